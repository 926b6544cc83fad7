//! The memory of all devices, in which programs run.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use burst_attention::cuda::driver::{Block, Copy};
use burst_attention_interpreter::execute::Kernels;
use burst_attention_interpreter::{Address, GridRun as Order, Memory};
use burst_attention_kernels::launch::Launch;
use burst_attention_recorder::{Action, Delivery, Program, Recorder, Stuck, replay};

/// All kernels, compiled once for all tests.
static KERNELS: LazyLock<Kernels> = LazyLock::new(Kernels::default);

/// The operations that a launch may take, enough for any small problem.
const OPERATIONS: u64 = 1 << 24;

/// The memory of all devices. A device has the number of its program in the recorder.
#[derive(Default)]
pub struct World {
    /// All allocations of all devices, each at its own address.
    pub memory: Memory,
    /// For the first byte of each allocation, its last byte and its device.
    owners: BTreeMap<u64, (u64, usize)>,
}

impl World {
    /// Returns a world without memory.
    pub fn new() -> World {
        World::default()
    }

    /// Allocates memory of a device.
    pub fn allocate(&mut self, device: usize, name: &str, bytes: u64) -> Address {
        let at = self.memory.allocate(name, bytes);
        self.owners.insert(at.0, (at.0 + bytes.max(1) - 1, device));
        at
    }

    /// Adds the memory that a recorder's devices allocated.
    pub fn adopt(&mut self, recorder: &Recorder) {
        let devices: Vec<_> = recorder.programs().iter().map(|program| program.compute).collect();
        for made in recorder.allocations() {
            if self.memory.contains(Address(made.address), made.bytes as u64) {
                continue;
            }
            let device = devices.iter().position(|device| *device == made.device);
            let device = device.expect("each allocation belongs to a device of the recorder");
            let at = Address(made.address);
            self.memory.allocate_at("memory of the driver", at, made.bytes as u64);
            self.owners.insert(at.0, (at.0 + made.bytes as u64 - 1, device));
        }
    }

    /// Carries out the programs of all devices, in an order that the seed decides.
    ///
    /// # Errors
    /// If the programs get stuck, a kernel fails, or an array lies outside of its device's memory.
    pub fn carry_out(&mut self, programs: &[Program], seed: u64) -> Result<(), Stuck> {
        let mut launches = seed;
        replay(programs, seed, |action| match action {
            Action::Launch(device, launch) => {
                launches += 1;
                self.launch(device, launch, launches)
            }
            Action::Copy(device, copy) => self.copy(device, copy),
            Action::Message(delivery) => self.deliver(delivery),
        })
    }

    fn launch(&mut self, device: usize, launch: &Launch, seed: u64) -> Result<(), String> {
        for array in launch.footprint() {
            self.check(device, array.name, array.bytes.start)?;
            self.check(device, array.name, array.bytes.end.max(array.bytes.start + 1) - 1)?;
        }
        let order = Order { seed, operation_limit: OPERATIONS, ..Order::default() };
        let outcome = KERNELS.run(launch, &order, &mut self.memory);
        outcome.map_err(|error| error.to_string())
    }

    fn copy(&mut self, device: usize, copy: &Copy) -> Result<(), String> {
        let Copy { from, to } = copy;
        for line in 0..from.height {
            let at = |block: &Block| block.address + line * block.pitch;
            self.check(device, "source", at(from))?;
            self.check(device, "target", at(to))?;
            self.transfer(at(from), at(to), from.width)?;
        }
        Ok(())
    }

    fn deliver(&mut self, delivery: Delivery) -> Result<(), String> {
        let Delivery { from, to, bytes } = delivery;
        self.check(from.0, "sent message", from.1)?;
        self.check(to.0, "received message", to.1)?;
        self.transfer(from.1, to.1, bytes)
    }

    /// Copies bytes. The memory itself checks that each range lies in one allocation.
    fn transfer(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), String> {
        let outcome = self.memory.copy(Address(from), Address(to), bytes);
        outcome.map_err(|fault| fault.to_string())
    }

    /// Checks that an address lies in the device's memory.
    fn check(&self, device: usize, what: &str, address: u64) -> Result<(), String> {
        let below = self.owners.range(..=address).next_back();
        match below.filter(|(_, (last, _))| address <= *last) {
            Some((_, (_, owner))) if *owner == device => Ok(()),
            Some((_, (_, owner))) => {
                Err(format!("{what} at {address:#x} lies on device {owner}, not on {device}"))
            }
            None => Err(format!("{what} at {address:#x} lies in no memory")),
        }
    }
}
