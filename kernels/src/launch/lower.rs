//! From a description to its launches.

use super::Launch;
use super::array::{Array, find};
use super::cut::{Cut, cuts};
use super::job::Job;
use super::order::order;
use super::rectangle::Side;
use crate::error::LaunchError;
use crate::instances::Instance;
use crate::kernel::Kernel;
use crate::place::Rows;
use crate::record::{Argument, Operand, Value};
use crate::target::Target;
use crate::tiles::width_of;
use crate::variant::Variant;

/// Declares the launches of descriptions, which follow from the `job` of each.
macro_rules! launches {
    ($($description:ident),*) => {$(
        impl $description {
            /// Returns the launches that compute it, to be run in order on a device of `target`.
            ///
            /// # Errors
            /// [`LaunchError`], with the expected value and the value that came.
            ///
            /// [`LaunchError`]: super::LaunchError
            pub fn launches(
                &self,
                target: $crate::target::Target,
            ) -> Result<Vec<super::Launch>, super::LaunchError> {
                self.launches_within(target, super::MAX_VIEW_BYTES)
            }

            /// Returns launches whose views are below `limit` bytes too. A small limit cuts small
            /// problems as if they were large.
            ///
            /// # Errors
            /// [`LaunchError`], with the expected value and the value that came.
            ///
            /// [`LaunchError`]: super::LaunchError
            pub fn launches_within(
                &self,
                target: $crate::target::Target,
                limit: u64,
            ) -> Result<Vec<super::Launch>, super::LaunchError> {
                self.job().launches(target, limit.min(super::MAX_VIEW_BYTES))
            }
        }
    )*};
}

pub(super) use launches;

impl Job {
    /// Returns the launches, each of whose views spans less than `limit` bytes.
    pub fn launches(mut self, target: Target, limit: u64) -> Result<Vec<Launch>, LaunchError> {
        self.check_sizes()?;
        self.check_arrays()?;
        self.lay_out_absent();
        let Some(instance) = self.instance(target) else {
            let expected = "none, since no fused kernel computes this (see can_fuse)";
            return Err(LaunchError::invalid("dq_acc", expected, "an accumulator"));
        };
        let mut launches = Vec::new();
        for cut in &cuts(&self, instance.tile(), limit)? {
            for job in self.ranges(cut).into_iter().chain(self.masks(cut)) {
                launches.extend(job.launches(target, limit)?);
            }
            let order = order(&self, cut, instance.tile(), instance.target)?;
            let value = |argument| self.value(argument, cut, order);
            launches.push(Launch::new(instance, order.blocks, value)?);
        }
        Ok(launches)
    }

    /// Returns the image that computes the job; `None` if no fused image computes a fused job.
    pub fn instance(&self, target: Target) -> Option<Instance> {
        let width = width_of(self.rectangle.head_dim.max(self.rectangle.value_dim))?;
        let (kernel, element, variant) = (self.kernel, self.rectangle.element, self.variant());
        Instance { kernel, variant, element, width, target }.smallest()
    }

    /// Returns the variant that an image must serve.
    fn variant(&self) -> Variant {
        if !self.kernel.has_pairs() {
            return Variant::PLAIN;
        }
        // Whether the first key of the rectangle is hidden from its last query.
        let q_len = self.rectangle.q_len;
        let window = q_len > 0 && self.rectangle.lower > 1 - q_len as i64;
        Variant { window, fused: self.fused, ..Variant::PLAIN.with(self.features.set()) }
    }

    /// Returns the job that finds which rows the segments of a cut's resident rows let them see;
    /// `None` where the cut has no segments or streams nothing.
    fn ranges(&self, cut: &Cut) -> Option<Job> {
        self.features.segments.filter(|_| cut.lower <= cut.upper)?;
        if self.features.visible.is_some() {
            return None;
        }
        let (own, other) = (self.resident, self.resident.other());
        let segments = |side| match side {
            Side::Queries => Operand::QSegments,
            Side::Keys => Operand::KvSegments,
        };
        let at = |operand| {
            let array = find(&self.arrays, operand);
            let address = array.at(&cut.batch, cut.rows(array.side));
            Some(Rows { address, batch_stride: array.batch_stride })
        };
        // All rows of the cut, whatever the band lets them see, in the only image of this kernel.
        let (kernel, heads, head_dim) = (Kernel::SegmentRanges, 1, 8);
        let sizes = (cut.batch.len(), cut.rows(own).len(), heads, head_dim);
        let mut job = Job::per_row(kernel, sizes, kernel.elements()[0]);
        job.rectangle.kv_len = cut.rows(other).len();
        let job = job
            .array(Operand::Segments, at(segments(own)))
            .array(Operand::Others, at(segments(other)))
            .array(Operand::Ranges, at(Operand::Ranges));
        Some(job)
    }

    /// Gives arrays that are not given a layout, as if entries and heads were contiguous, because
    /// the kernels make views of them too. An array without rows counts as not given.
    fn lay_out_absent(&mut self) {
        let laid_out = |array: &Array| {
            if array.is_given() && self.rows(array.side) > 0 {
                return array.clone();
            }
            Array { address: 0, ..array.clone() }.contiguous(|size| self.size(size))
        };
        self.arrays = self.arrays.iter().map(laid_out).collect();
    }
}

impl Launch {
    /// Returns a checked launch of `blocks` blocks whose arguments have the values of `value`.
    ///
    /// Where an array is neither given nor used, another array's address takes its place: the
    /// driver makes tensor maps of all views before the kernel runs, also of views that the kernel
    /// leaves alone, and need not accept null.
    pub(super) fn new(
        instance: Instance,
        blocks: u32,
        value: impl Fn(&'static Argument) -> Result<Value, LaunchError>,
    ) -> Result<Launch, LaunchError> {
        let arguments = instance.kernel.arguments();
        let values = arguments.iter().map(value).collect::<Result<_, _>>()?;
        let mut launch = Launch::of_image(instance, [blocks, 1, 1], values);
        let given = |value: &Value| matches!(value, Value::Pointer(address) if *address != 0);
        if let Some(other) = launch.values.iter().copied().find(given) {
            for (n, argument) in arguments.iter().enumerate() {
                if launch.values[n] == Value::Pointer(0) && !launch.uses(argument) {
                    launch.values[n] = other;
                }
            }
        }
        launch.check()?;
        Ok(launch)
    }
}
