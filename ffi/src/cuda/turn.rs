//! A handler's turn on one device: what it tells, and the watch over it.

use burst_attention::cuda::driver::Stream;

use super::Platform;
use super::told::Told;
use super::watch::{DeviceName, WatchedCall};
use crate::error::{Error, Result};
use crate::frame::CallFrame;

/// The initialize or the execute stage of a call on one device.
pub struct Turn<'a> {
    told: &'a Told<'a>,
    /// XLA's stream.
    pub stream: Stream,
    call: Option<WatchedCall>,
}

impl Turn<'_> {
    /// Runs a stage under the watch of the platform. `axis` is the mesh axis of a ring of several
    /// devices.
    ///
    /// # Errors
    /// The error of `body`, or of XLA if it has no stream for the call.
    pub fn run(
        frame: &CallFrame<'_>,
        platform: &'static Platform,
        told: &Told<'_>,
        axis: Option<String>,
        body: impl FnOnce(&Turn<'_>) -> Result<()>,
    ) -> Result<()> {
        let stream = Stream(frame.runtime().stream(frame.context())?);
        let watched = |watch| -> Result<WatchedCall> {
            let run = frame.runtime().run_id(frame.context())?;
            let name = DeviceName { device: told.device, axis };
            Ok(WatchedCall::new(watch, platform, stream, run, name))
        };
        let call = platform.watch.as_ref().map(watched).transpose()?;
        let turn = Turn { told, stream, call };
        body(&turn).inspect_err(|_| turn.failed())
    }

    /// Tells of an error at once, before the stage ends. Peers may wait for this rank from now on.
    pub fn tell(&self, error: &Error) {
        self.told.tell(error);
        self.failed();
    }

    /// Leaves out the errors from now on, because their cause was told before.
    pub fn told_before(&self) {
        self.told.told_before();
    }

    /// Says that the device has all commands of the call.
    ///
    /// # Errors
    /// If the driver refuses to mark the place.
    pub fn issued(&self) -> Result<()> {
        Ok(self.call.as_ref().map_or(Ok(()), WatchedCall::issued)?)
    }

    fn failed(&self) {
        self.call.iter().for_each(WatchedCall::failed);
    }
}
