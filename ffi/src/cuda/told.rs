//! Errors on one device alone. XLA keeps such an error with that device's results, and a program
//! that waits for another device first never sees it. So it is also written to stderr, at once.

use std::cell::Cell;
use std::io::Write as _;

use burst_attention::cuda::error::caught;

use super::Platform;
use crate::error::{Error, Result};
use crate::frame::CallFrame;

/// A function that takes the lines about errors: [`to_stderr`], or a list of a test.
pub type Write = dyn Fn(&str) + Send + Sync;

/// Writes the first error of one handler call.
pub struct Told<'a> {
    /// The device of the call.
    pub device: Option<i32>,
    write: &'a Write,
    is_told: Cell<bool>,
}

impl Told<'_> {
    /// Writes the error of `body` where `platform` has its lines, unless `body` has told it or an
    /// earlier error, and turns a panic of `body` into an error.
    ///
    /// # Errors
    /// The error of `platform` or of `body`.
    pub fn run(
        frame: &mut CallFrame<'_>,
        platform: Result<&'static Platform>,
        body: impl FnOnce(&mut CallFrame<'_>, &'static Platform, &Told<'_>) -> Result<()>,
    ) -> Result<()> {
        let device = frame.runtime().device_ordinal(frame.context()).ok();
        let write = platform.as_ref().map_or(&to_stderr as &Write, |platform| &*platform.write);
        let told = Told { device, write, is_told: Cell::new(false) };
        let outcome = platform.and_then(|platform| {
            caught(|| Ok(body(frame, platform, &told))).unwrap_or_else(|panic| Err(panic.into()))
        });
        outcome.inspect_err(|error| told.tell(error))
    }

    /// Writes an error if it may concern this device alone, and nothing was told before.
    pub fn tell(&self, error: &Error) {
        if !error.is_of_one_device() || self.is_told.replace(true) {
            return;
        }
        (self.write)(&self.line(error));
    }

    /// Leaves out the errors from now on, because their cause was told before.
    pub fn told_before(&self) {
        self.is_told.set(true);
    }

    fn line(&self, error: &Error) -> String {
        let device = self.device.map_or(String::new(), |device| format!("device {device}: "));
        format!("{device}{error}")
    }
}

/// Writes a line to stderr.
pub fn to_stderr(line: &str) {
    let line = format!("burst_attention: {}\n", line.replace('\n', " "));
    // One write, so that lines of several devices do not mix. Nobody reads a closed stderr.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use burst_attention::cuda::error::CudaError;

    use super::*;

    #[test]
    fn an_error_of_one_device_is_one_line_and_is_told_once() {
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let written = lines.clone();
        let write = move |line: &str| written.lock().expect("no poison").push(line.to_owned());
        let told = Told { device: Some(3), write: &write, is_told: Cell::new(false) };
        let driver = CudaError::Driver { call: "cuLaunchKernel", reason: "a\nb".into() };
        let ring = |error: CudaError| Error::Ring {
            axis: "context".into(),
            error: Box::new(burst_attention::Error::from(error)),
        };
        let line = told.line(&ring(driver));
        let expected = "device 3: ring over mesh axis \"context\": cuLaunchKernel failed: a\nb";
        assert_eq!(line, expected);
        let others = vec![1];
        told.tell(&ring(CudaError::NotReady { rank: 0, world_size: 2, others }));
        told.tell(&Error::mismatch("dtype", "bfloat16", "float32"));
        assert!(!told.is_told.get(), "neither is an error of this device alone");
        told.tell(&Error::Abandoned);
        told.tell(&Error::Abandoned);
        let expected = format!("device 3: {}", Error::Abandoned);
        assert_eq!(*lines.lock().expect("no poison"), [expected]);
    }
}
