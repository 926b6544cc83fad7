//! The backend of this library's own kernels. It serves every operation, except that a fused kernel
//! exists for some features and widths only.

use super::{Backend, Computation, Reason};
use crate::cost;
use crate::launch::{KeyGrads, LaunchError, TileOperation};
use crate::target::Target;

/// The name.
pub const NAME: &str = "tile";

/// The backend.
pub const BACKEND: Backend = Backend {
    name: NAME,
    serves: |operation, target| match operation {
        TileOperation::KeyGrads(tile) if tile.dq_acc.is_some() => fuses(tile, target),
        _ => Ok(()),
    },
    needs: |_, _| None,
    cost: cost::own,
    lower: |operation, target, _| Ok(launches(operation, target)?.collect()),
    scratch_bytes: |_, _| 0,
};

/// Says whether the fused kernel computes an operation.
fn fuses(tile: &KeyGrads, target: Target) -> Result<(), Reason> {
    let refused = |reason: &'static str| Err(Reason(reason.into()));
    if tile.fixed_order {
        return refused("its fused kernel adds to dq in any order");
    }
    if tile.rectangle.head_dim != tile.rectangle.value_dim {
        return refused("its fused kernel needs as many columns of values as of keys");
    }
    tile.can_fuse(target)
}

/// Returns the launches that compute an operation.
pub(super) fn launches(
    operation: &TileOperation,
    target: Target,
) -> Result<impl Iterator<Item = Computation> + use<>, LaunchError> {
    Ok(operation.launches(target)?.into_iter().map(Computation::Launch))
}
