//! Launches on XLA's stream alone, for linear attention, whose exchange XLA does.

use burst_attention_kernels::instances::{Instance, Target};
use burst_attention_kernels::launch::{Launch, LaunchError};

use super::device::{Executor, lock};
use super::driver::Stream;
use super::error::CudaError;
use crate::error::Result;

impl Executor {
    /// Loads a kernel on the device of XLA's `stream`. The call is fast if the device has it.
    ///
    /// # Errors
    /// If there are no kernels for the device, or the driver refuses.
    pub fn prepare(&self, stream: Stream, instance: impl FnOnce(Target) -> Instance) -> Result<()> {
        self.within(stream, |context| {
            let device = self.device(context);
            let mut device = lock(&device);
            let instance = instance(self.target(&mut device)?);
            self.load(&mut device, instance)
        })
    }

    /// Enqueues launches of prepared kernels in order, and waits for none of them.
    ///
    /// # Errors
    /// If the launches can't be described, a kernel was not prepared, or the driver refuses.
    pub fn launch(
        &self,
        stream: Stream,
        launches: impl FnOnce(Target) -> std::result::Result<Vec<Launch>, LaunchError>,
    ) -> Result<()> {
        self.within(stream, |context| {
            let device = self.device(context);
            let mut device = lock(&device);
            let launches = launches(self.target(&mut device)?).map_err(CudaError::Launch)?;
            launches.iter().try_for_each(|launch| device.launch(&*self.driver, stream, launch))
        })
    }
}
