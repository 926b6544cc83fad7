//! The memory that a launch touches, from its values alone.

use std::ops::Range;

use super::Launch;
use super::array::{Array, resident_side, side};
use crate::instances::Instance;
use crate::place::Statistics;
use crate::record::{Access, Argument, Meaning, Size, Value};
use crate::variant::{Decays, Variant};

/// The part of an array that a launch may touch, and what it does with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint {
    /// The argument that leads to it.
    pub name: &'static str,
    /// Addresses from the first to the last element of the kernel's view. The launch never touches
    /// the gaps between entries, or between heads of statistics.
    pub bytes: Range<u64>,
    /// Whether the launch reads some of it.
    pub reads: bool,
    /// Whether the launch writes some of it.
    pub writes: bool,
}

impl Launch {
    /// Returns all memory that the launch may touch, in the order of the kernel's record.
    ///
    /// Arrays that the launch does not use have no part in it, whatever their address: arrays that
    /// `first`, `last` or `has_…` leave out, and streamed arrays where the band is empty. Of
    /// streamed arrays all rows count, whether or not the band lets a row see anything of them.
    ///
    /// # Panics
    /// If a pointer of the kernel's record has no address, which [`check`](Self::check) refuses.
    pub fn footprint(&self) -> Vec<Footprint> {
        let arguments = self.instance().kernel.arguments().iter();
        arguments.filter_map(|argument| self.footprint_of(argument)).collect()
    }

    fn footprint_of(&self, argument: &'static Argument) -> Option<Footprint> {
        let (name, (reads, writes)) = (argument.name, self.access(argument));
        if !reads && !writes {
            return None;
        }
        let array = self.array(argument)?;
        let rows = array.counts.map_or(1, |rows| self.size(rows));
        let span = u64::try_from(array.span(self.size(Size::Batch), rows)).unwrap_or(u64::MAX);
        let bytes = array.address..array.address.saturating_add(span);
        Some(Footprint { name, bytes, reads, writes })
    }

    /// Whether the launch touches the array that the argument points to.
    pub(super) fn uses(&self, argument: &'static Argument) -> bool {
        let (reads, writes) = self.access(argument);
        reads || writes
    }

    /// Whether the launch reads the array that the argument points to, and whether it writes it.
    fn access(&self, argument: &'static Argument) -> (bool, bool) {
        let Some(view) = argument.view else { return (false, false) };
        if argument.flag.is_some_and(|array| !self.is_on(Meaning::Has(array))) {
            return (false, false);
        }
        let Instance { kernel, variant: Variant { fused, decays, .. }, .. } = self.instance();
        // The kernels read arrays of features where something is streamed.
        let is_resident = side(kernel, &view) == resident_side(kernel) && argument.flag.is_none();
        let limits = self.integer(Meaning::Lower).zip(self.integer(Meaning::Upper));
        let is_met = is_resident || limits.is_none_or(|(lower, upper)| lower <= upper);
        match argument.access {
            Access::In => (is_met, false),
            Access::Out => (false, true),
            Access::Update => (true, true),
            Access::FusedAdd => {
                let adds = is_met && fused;
                (adds, adds)
            }
            Access::HeadsIn => (decays == Decays::Heads, false),
            Access::KeyChannelsIn => (decays == Decays::KeyChannels, false),
            Access::ValueChannelsIn => (decays == Decays::ValueChannels, false),
            Access::LastOut => (false, self.is_on(Meaning::Last)),
            Access::Carry => (!self.is_on(Meaning::First), !self.is_on(Meaning::Last)),
        }
    }

    /// Whether the argument of a meaning is 1.
    pub(super) fn is_on(&self, meaning: Meaning) -> bool {
        self.integer(meaning) == Some(1)
    }

    /// Returns the integer of a meaning, if the kernel has such an argument.
    fn integer(&self, meaning: Meaning) -> Option<i32> {
        match self.values[self.instance().kernel.find(meaning)?.0] {
            Value::I32(integer) => Some(integer),
            _ => None,
        }
    }

    /// Returns the integer of a meaning as a number of elements; 0 if the kernel has no such
    /// argument.
    fn count(&self, meaning: Meaning) -> usize {
        self.integer(meaning).and_then(|count| count.try_into().ok()).unwrap_or(0)
    }

    fn size(&self, size: Size) -> usize {
        self.count(Meaning::Size(size))
    }

    /// Returns the array that the argument leads to; `None` for a number.
    fn array(&self, argument: &'static Argument) -> Option<Array> {
        let Meaning::Address(operand) = argument.meaning else { return None };
        let (view, value) = (argument.view?, self.value(argument.name));
        let Some(Value::Pointer(address)) = value else {
            panic!("{} of {} must be an address, got {value:?}", argument.name, self.instance())
        };
        let batch_stride = Meaning::BatchStride(view.batch_stride);
        let head_stride =
            view.head_stride.map_or(0, |of| self.count(Meaning::HeadStride(of)) as u64);
        let at = Statistics { address, batch_stride: self.count(batch_stride) as u64, head_stride };
        let Instance { kernel, variant, element, .. } = self.instance();
        let size = |size| self.size(size);
        let array = Array::new((kernel, variant), operand, element, size, at);
        Some(if kernel.find(batch_stride).is_some() { array } else { array.contiguous(size) })
    }
}
