//! What the descriptions share: their sizes, their arrays, and the way to launches.

use super::array::{Array, Side, Sizes};
use super::description::{Rectangle, Rows, Statistics};
use super::error::LaunchError;
use super::features::Features;
use super::order::order;
use super::per_row::per_row;
use super::split::{Piece, pieces};
use super::{Launch, MAX_VIEW_BYTES};
use crate::features::FeatureSet;
use crate::instances::{Element, Instance, Kernel, Target, width_of};
use crate::kernel::Task;
use crate::record::Argument;

/// Any description, in terms of the kernel's arguments.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub kernel: Kernel,
    pub element: Element,
    pub batch: usize,
    pub q_len: usize,
    pub kv_len: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub lower: i64,
    pub upper: i64,
    pub softmax_scale: f32,
    pub features: Features,
    /// dq is added to as well.
    pub fused: bool,
    /// Factor of sums.
    pub scale: f32,
    /// Whose results a block keeps.
    pub resident: Side,
    pub first: bool,
    pub last: bool,
    pub arrays: Vec<Array>,
}

impl Job {
    /// A job over a rectangle, its arrays still to be placed.
    pub fn new(kernel: Kernel, rectangle: &Rectangle, (first, last): (bool, bool)) -> Job {
        let Rectangle { batch, q_len, kv_len, heads, kv_heads, head_dim, element, .. } = *rectangle;
        let Rectangle { value_dim, lower, upper, softmax_scale, .. } = *rectangle;
        Job {
            kernel,
            element,
            batch,
            q_len,
            kv_len,
            heads,
            kv_heads,
            head_dim,
            value_dim,
            lower,
            upper,
            softmax_scale,
            features: Features::default(),
            fused: false,
            scale: 1.0,
            resident: Side::resident(kernel),
            first,
            last,
            arrays: Vec::new(),
        }
    }

    /// Says where an array lies, other than statistics.
    pub fn array(self, name: &'static str, at: Option<Rows>) -> Job {
        let Rows { address, batch_stride } = at.unwrap_or_default();
        self.place(name, Statistics { address, batch_stride, head_stride: 0 })
    }

    /// Says where statistics lie.
    pub fn statistics(self, name: &'static str, at: Option<Statistics>) -> Job {
        let at = at.unwrap_or_default();
        let any_stride = self.heads == 1 || at.address == 0;
        let head_stride = if any_stride { self.q_len as u64 } else { at.head_stride };
        self.place(name, Statistics { head_stride, ..at })
    }

    fn place(mut self, name: &'static str, at: Statistics) -> Job {
        let Job { heads, kv_heads, head_dim, value_dim, .. } = self;
        let (q_heads, dot_heads, resident) = (heads, 0, self.resident);
        let sizes = Sizes { heads, kv_heads, head_dim, value_dim, q_heads, dot_heads, resident };
        self.arrays.push(Array::new(self.argument(name), sizes, at));
        self
    }

    /// Rows of one side.
    pub fn rows(&self, side: Side) -> usize {
        match side {
            Side::Queries => self.q_len,
            Side::Keys => self.kv_len,
        }
    }

    /// The record of the argument `name`.
    pub fn argument(&self, name: &str) -> &'static Argument {
        let found = self.kernel.arguments().iter().find(|argument| argument.name == name);
        found.unwrap_or_else(|| unreachable!("{} has no argument {name}", self.kernel.name()))
    }

    /// The launches, each of whose views spans less than `limit` bytes.
    pub fn launches(mut self, target: Target, limit: u64) -> Result<Vec<Launch>, LaunchError> {
        self.check_sizes()?;
        self.check_arrays()?;
        self.lay_out_absent();
        let Some(instance) = self.instance(target) else {
            let expected = "none, since no fused kernel computes this (see can_fuse)";
            return Err(LaunchError::invalid("dq_acc", expected, "an accumulator"));
        };
        let pieces = pieces(&self, instance.tile(), limit.min(MAX_VIEW_BYTES))?;
        let mut launches = Vec::new();
        for piece in &pieces {
            if let Some(ranges) = self.ranges(piece) {
                launches.extend(ranges.launches(target, limit)?);
            }
            launches.push(self.launch(instance, piece)?);
        }
        Ok(launches)
    }

    /// The image that computes it; none if that is to be a fused one and there is none.
    pub fn instance(&self, target: Target) -> Option<Instance> {
        let width = width_of(self.head_dim.max(self.value_dim))?;
        let (kernel, element, features) = (self.kernel, self.element, self.feature_set());
        Instance { kernel, features, element, width, target }.smallest()
    }

    /// The features that an image must have.
    fn feature_set(&self) -> FeatureSet {
        if !matches!(self.kernel.spec().task, Task::Queries | Task::Keys) {
            return FeatureSet::NONE;
        }
        // Whether the first key of the rectangle is hidden from its last query.
        let window = self.q_len > 0 && self.lower > 1 - self.q_len as i64;
        let set = self.features.set().and(FeatureSet::WINDOW.when(window));
        set.and(FeatureSet::FUSED.when(self.fused))
    }

    /// What finds out which rows the segments of a piece's resident rows let them see; none where
    /// that is not asked for.
    fn ranges(&self, piece: &Piece) -> Option<Job> {
        self.features.segments.filter(|_| piece.lower <= piece.upper)?;
        let other = if self.resident == Side::Queries { Side::Keys } else { Side::Queries };
        let array = |side| match side {
            Side::Queries => "q_segments",
            Side::Keys => "kv_segments",
        };
        let at = |name| {
            let array = self.arrays.iter().find(|array| array.name == name)?;
            let address = self.address(name, piece);
            Some(Rows { address, batch_stride: array.batch_stride })
        };
        let [q_len, kv_len] = [self.resident, other].map(|side| piece.rows(side).len());
        // All rows of the piece, whatever the band lets them see, in the one image that there is.
        let (kernel, heads, head_dim) = (Kernel::SegmentRanges, 1, 8);
        let sizes = (piece.batch.len(), q_len, heads, head_dim);
        let job = Job { kv_len, ..per_row(kernel, sizes, kernel.elements()[0]) };
        let job = job.array("segments", at(array(self.resident))).array("others", at(array(other)));
        Some(job.array("ranges", at("ranges")))
    }

    /// Gives arrays that are not there a layout, since the kernels make views of them too: as if
    /// entries and heads were contiguous. So too for those that have no rows.
    fn lay_out_absent(&mut self) {
        let (q_len, kv_len) = (self.q_len, self.kv_len);
        for array in &mut self.arrays {
            let rows = if array.side == Side::Queries { q_len } else { kv_len };
            if rows == 0 {
                array.address = 0;
            }
            if !array.is_given() {
                // What doesn't fit 64 bits is too large for a launch anyway.
                array.batch_stride = u64::try_from(array.extent(rows)).unwrap_or(u64::MAX);
            }
        }
    }

    fn launch(&self, instance: Instance, piece: &Piece) -> Result<Launch, LaunchError> {
        let order = order(self, piece, instance.tile(), instance.target)?;
        let arguments = self.kernel.arguments().iter();
        let values = arguments.map(|argument| self.value(argument, piece, order));
        let mut launch = Launch {
            instance,
            grid: [order.blocks, 1, 1],
            values: values.collect::<Result<_, _>>()?,
        };
        launch.stand_in();
        launch.check()?;
        Ok(launch)
    }
}
