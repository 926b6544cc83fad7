//! Which memory a launch touches, from its values alone.

use std::ops::Range;

use super::Launch;
use super::array::{Array, Side, Sizes};
use super::description::Statistics;
use crate::features::FeatureSet;
use crate::record::{Access, Argument, Shape, Value};

/// The part of an array that a launch may touch, and what it does with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint {
    /// The argument that leads to it.
    pub name: &'static str,
    /// Addresses from the first to the last element of the kernel's view. What lies between its
    /// entries, or between heads of statistics, is never touched.
    pub bytes: Range<u64>,
    /// Whether the launch reads some of it.
    pub reads: bool,
    /// Whether the launch writes some of it.
    pub writes: bool,
}

impl Launch {
    /// All memory that the launch may touch, in the order of the kernel's record.
    ///
    /// Arrays that it does not use have no part in it, whatever their address: those that `first`,
    /// `last` or `has_…` leave out, and what would be streamed where the band is empty. Of streamed
    /// arrays all rows count, whether or not the band lets anything be seen of them.
    ///
    /// # Panics
    /// Where [`check`](Self::check) finds that the values are not those of the kernel's record.
    pub fn footprint(&self) -> Vec<Footprint> {
        let arguments = self.instance.kernel.arguments().iter();
        arguments.filter_map(|argument| self.footprint_of(argument)).collect()
    }

    fn footprint_of(&self, argument: &'static Argument) -> Option<Footprint> {
        let (name, (reads, writes)) = (argument.name, self.access(argument));
        if !reads && !writes {
            return None;
        }
        let array = self.array(argument)?;
        let (entries, rows) = self.counts(argument.view?.shape);
        let span = array.span(entries, rows);
        let span = u64::try_from(span).unwrap_or(u64::MAX);
        let bytes = array.address..array.address.saturating_add(span);
        Some(Footprint { name, bytes, reads, writes })
    }

    /// Entries and rows of an array.
    fn counts(&self, shape: Shape) -> (usize, usize) {
        let rows = match shape {
            Shape::LinearStates => {
                let states = ["batch", "parts", "heads"].map(|name| self.size(name));
                return (states.iter().product(), self.size("head_dim"));
            }
            Shape::LinearSums | Shape::LinearDots => "padded_rows",
            _ if Side::of(shape, self.resident()) == Side::Keys => "kv_len",
            _ if self.value("q_len").is_none() => "rows",
            _ => "q_len",
        };
        (self.size("batch"), self.size(rows))
    }

    /// Does the launch touch what the argument points to?
    pub(super) fn uses(&self, argument: &Argument) -> bool {
        let (reads, writes) = self.access(argument);
        reads || writes
    }

    /// Does the launch read what the argument points to, and does it write it?
    fn access(&self, argument: &Argument) -> (bool, bool) {
        let Some(view) = argument.view else { return (false, false) };
        let resident = self.resident();
        // Segments and numbers for dropout are read where something is streamed.
        let is_resident = Side::of(view.shape, resident) == resident && argument.flag.is_none();
        let is_met = self.streams() || is_resident;
        let is_on = argument.flag.is_none_or(|flag| self.flag(flag));
        match argument.access {
            Access::In => (is_met, false),
            Access::MaybeIn => (is_met && is_on, false),
            Access::Out => (false, true),
            Access::OptionalOut => (false, is_on),
            Access::Update => (true, true),
            Access::MaybeUpdate => (is_on, is_on),
            Access::FusedAdd => {
                let adds = is_met && self.instance.features.has(FeatureSet::FUSED);
                (adds, adds)
            }
            Access::MaybeOut => (false, self.flag("last")),
            Access::Carry => (!self.flag("first"), !self.flag("last")),
        }
    }

    fn resident(&self) -> Side {
        Side::resident(self.instance.kernel)
    }

    /// Does the band let a resident row see anything?
    fn streams(&self) -> bool {
        match (self.value("lower"), self.value("upper")) {
            (Some(Value::I32(lower)), Some(Value::I32(upper))) => lower <= upper,
            _ => true,
        }
    }

    /// Is the argument `name` 1?
    pub(super) fn flag(&self, name: &str) -> bool {
        self.value(name) == Some(Value::I32(1))
    }

    /// The argument `name` as a number of elements; 0 where the kernel has none of that name.
    fn size(&self, name: &str) -> usize {
        match self.value(name) {
            Some(Value::I32(size)) => usize::try_from(size).unwrap_or(0),
            Some(other) => panic!("{name} of {} must be an integer, got {other}", self.instance),
            None => 0,
        }
    }

    /// The array that the argument leads to; nothing for a number.
    fn array(&self, argument: &'static Argument) -> Option<Array> {
        let (view, value) = (argument.view?, self.value(argument.name));
        let Some(Value::Pointer(address)) = value else {
            panic!("{} of {} must be an address, got {value:?}", argument.name, self.instance)
        };
        let [heads, kv_heads, q_heads, dot_heads, head_dim] =
            ["heads", "kv_heads", "q_heads", "dot_heads", "head_dim"].map(|n| self.size(n));
        let value_dim = self.value("value_dim").map_or(head_dim, |_| self.size("value_dim"));
        let batch_stride = self.size(view.batch_stride) as u64;
        let head_stride = view.head_stride.map_or(0, |name| self.size(name)) as u64;
        let resident = self.resident();
        let sizes = Sizes { heads, kv_heads, head_dim, value_dim, q_heads, dot_heads, resident };
        Some(Array::new(argument, sizes, Statistics { address, batch_stride, head_stride }))
    }
}
