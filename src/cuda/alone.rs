//! Launches that need nothing but the stream they are given: linear attention's, whose exchange is
//! XLA's.

use burst_attention_kernels::instances::{Instance, Target};
use burst_attention_kernels::launch::{Launch, LaunchError};

use super::device::{Executor, lock, uninitialized};
use super::driver::Stream;
use crate::error::Result;

impl Executor {
    /// Loads a kernel on the device of XLA's `stream`. Fast where it is there.
    ///
    /// # Errors
    /// If the device is of no kind that there are kernels for, or the driver refuses.
    pub fn prepare(&self, stream: Stream, instance: impl FnOnce(Target) -> Instance) -> Result<()> {
        self.within(stream, |context| {
            let device = self.device(context)?;
            let mut device = lock(&device);
            let instance = instance(device.target);
            self.load(&mut device, instance)
        })
    }

    /// Issues launches of kernels that were prepared, in their order. Nothing is awaited.
    ///
    /// # Errors
    /// If there are no such launches, a kernel was not prepared, or the driver refuses.
    pub fn launch(
        &self,
        stream: Stream,
        launches: impl FnOnce(Target) -> std::result::Result<Vec<Launch>, LaunchError>,
    ) -> Result<()> {
        self.within(stream, |context| {
            let device = self.device(context)?;
            let device = lock(&device);
            launches(device.target)?.iter().try_for_each(|launch| {
                let function = device.functions.get(&launch.instance);
                let function = function.ok_or_else(|| uninitialized(launch.instance))?;
                self.driver.launch(stream, *function, launch)
            })
        })
    }
}
