//! The common form of the descriptions of softmax attention: sizes, features and arrays.

use super::array::{Array, resident_side};
use super::rectangle::{Rectangle, Side};
use crate::element::Element;
use crate::features::Features;
use crate::kernel::Kernel;
use crate::place::{Rows, Statistics};
use crate::record::{Operand, Size};
use crate::variant::Variant;

/// A description in terms of its kernel's arguments.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub kernel: Kernel,
    pub rectangle: Rectangle,
    pub features: Features,
    /// Whether the kernel adds to dq too.
    pub fused: bool,
    /// Whether the blocks for which [`Kernel::MaskRuns`] finds runs keep keys.
    pub keys_stay: bool,
    /// Factor on sums.
    pub scale: f32,
    /// The side whose results a block keeps.
    pub resident: Side,
    pub first: bool,
    pub last: bool,
    pub arrays: Vec<Array>,
}

impl Job {
    /// Returns a job over a rectangle without its arrays.
    pub fn new(kernel: Kernel, rectangle: Rectangle, (first, last): (bool, bool)) -> Job {
        Job {
            kernel,
            rectangle,
            features: Features::default(),
            fused: false,
            keys_stay: false,
            scale: 1.0,
            resident: resident_side(kernel),
            first,
            last,
            arrays: Vec::new(),
        }
    }

    /// Returns a job over rows alone: queries that see no keys.
    pub fn per_row(
        kernel: Kernel,
        (batch, q_len, heads, head_dim): (usize, usize, usize, usize),
        element: Element,
    ) -> Job {
        let rectangle = Rectangle {
            batch,
            q_len,
            kv_len: 0,
            heads,
            kv_heads: heads,
            head_dim,
            value_dim: head_dim,
            element,
            lower: i64::MIN,
            upper: i64::MAX,
            softmax_scale: 1.0,
        };
        Job::new(kernel, rectangle, (true, true))
    }

    /// Adds an array that is no statistics.
    pub fn array(self, operand: Operand, at: Option<Rows>) -> Job {
        let Rows { address, batch_stride } = at.unwrap_or_default();
        self.place(operand, Statistics { address, batch_stride, head_stride: 0 })
    }

    /// Adds an array of statistics.
    pub fn statistics(self, operand: Operand, at: Option<Statistics>) -> Job {
        let at = at.unwrap_or_default();
        let any_stride = self.rectangle.heads == 1 || at.address == 0;
        let head_stride = if any_stride { self.rectangle.q_len as u64 } else { at.head_stride };
        self.place(operand, Statistics { head_stride, ..at })
    }

    fn place(mut self, operand: Operand, at: Statistics) -> Job {
        let element = self.rectangle.element;
        let image = (self.kernel, Variant::PLAIN.with(self.features.set()));
        let mut array = Array::new(image, operand, element, |size| self.size(size), at);
        if self.is_packed(operand) {
            array = array.contiguous(|size| self.size(size));
        }
        self.arrays.push(array);
        self
    }

    /// Returns the rows of one side.
    pub fn rows(&self, side: Side) -> usize {
        self.size(side.size())
    }

    /// Returns a size of the whole job.
    pub fn size(&self, size: Size) -> usize {
        let rectangle = &self.rectangle;
        match size {
            Size::Batch => rectangle.batch,
            Size::QLen => rectangle.q_len,
            Size::KvLen => rectangle.kv_len,
            Size::Heads => rectangle.heads,
            Size::KvHeads => rectangle.kv_heads,
            Size::HeadDim => rectangle.head_dim,
            Size::ValueDim => rectangle.value_dim,
            other => unreachable!("{} has no {other:?}", self.kernel.name()),
        }
    }
}
