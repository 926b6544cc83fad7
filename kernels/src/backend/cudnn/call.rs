//! Calls of cuDNN, array by array.

use std::collections::BTreeMap;
use std::ops::Range;

use super::plan::{Sdpa, SdpaArray, SdpaOrder, SdpaPass, WORKSPACE};
use super::{NAME, limits};
use crate::backend::{Computation, LibraryCall};
use crate::launch::{Footprint, Rectangle, Rows, Statistics};

/// An array of a call: where it lies, and whether the call writes it.
struct Given {
    array: SdpaArray,
    address: u64,
    strides: [i64; 4],
    writes: bool,
}

/// Makes a call, array by array.
pub(super) struct CallBuilder {
    plan: Sdpa,
    arrays: Vec<Given>,
}

impl CallBuilder {
    pub(super) fn new(
        pass: SdpaPass,
        rectangle: &Rectangle,
        workspace: &Range<u64>,
    ) -> CallBuilder {
        let Rectangle { batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim, .. } =
            *rectangle;
        let (lower, upper) = limits(rectangle);
        let plan = Sdpa {
            pass,
            order: SdpaOrder::Any,
            element: rectangle.element,
            batch: batch as i64,
            q_len: q_len as i64,
            kv_len: kv_len as i64,
            heads: heads as i64,
            kv_heads: kv_heads as i64,
            head_dim: head_dim as i64,
            value_dim: value_dim as i64,
            lower,
            upper,
            softmax_scale: rectangle.softmax_scale,
            workspace_bytes: (workspace.end - workspace.start) as i64,
            strides: BTreeMap::new(),
        };
        CallBuilder { plan, arrays: Vec::new() }
    }

    /// Sets the order of the sums of gradients.
    pub(super) fn in_order(mut self, order: SdpaOrder) -> CallBuilder {
        self.plan.order = order;
        self
    }

    /// Adds an array `[batch, rows, heads, columns]`.
    pub(super) fn rows(self, array: SdpaArray, at: Rows, writes: bool) -> CallBuilder {
        let [batch, heads, rows, columns] = self.plan.dims(array);
        let entry = rows * heads * columns;
        // One entry may have any stride.
        let entry = if batch == 1 { entry } else { at.batch_stride as i64 };
        self.array(Given {
            array,
            address: at.address,
            strides: [entry, columns, heads * columns, 1],
            writes,
        })
    }

    /// Adds an array without gaps.
    pub(super) fn packed(self, array: SdpaArray, address: u64, writes: bool) -> CallBuilder {
        let [_, heads, rows, columns] = self.plan.dims(array);
        let batch_stride = (rows * heads * columns) as u64;
        self.rows(array, Rows { address, batch_stride }, writes)
    }

    /// Adds statistics `[batch, heads, rows]`.
    pub(super) fn statistics(self, array: SdpaArray, at: Statistics, writes: bool) -> CallBuilder {
        let strides = [at.batch_stride as i64, at.head_stride as i64, 1, 1];
        self.array(Given { array, address: at.address, strides, writes })
    }

    fn array(mut self, given: Given) -> CallBuilder {
        self.plan.strides.insert(given.array, given.strides);
        self.arrays.push(given);
        self
    }

    pub(super) fn call(self, workspace: Range<u64>) -> Computation {
        let footprint = |given: &Given| {
            let dims = self.plan.dims(given.array).into_iter().zip(given.strides);
            let last: i64 = dims.map(|(length, stride)| (length - 1) * stride).sum();
            let is_float32 = self.plan.is_float32(given.array);
            let bytes = if is_float32 { 4 } else { self.plan.element.bytes() as u64 };
            let bytes = given.address..given.address + (last + 1) as u64 * bytes;
            let Given { array, writes, .. } = *given;
            (array.number(), Footprint { name: array.name(), bytes, reads: !writes, writes })
        };
        let workspace =
            Footprint { name: "workspace", bytes: workspace, reads: true, writes: true };
        let arrays = self.arrays.iter().map(footprint).chain([(WORKSPACE, workspace)]).collect();
        Computation::Library(LibraryCall { library: NAME, plan: self.plan.text(), arrays })
    }
}
