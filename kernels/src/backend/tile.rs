//! The backend of this library's own kernels. It serves every operation, except that a fused kernel
//! exists for some features and widths only.

use super::{Backend, Computation};
use crate::launch::{LaunchError, TileOperation};
use crate::target::Target;

/// The name.
pub const NAME: &str = "tile";

/// The backend.
pub const BACKEND: Backend = Backend {
    name: NAME,
    serves: |operation, target| match operation {
        TileOperation::KeyGrads(tile) if tile.dq_acc.is_some() => tile.can_fuse(target),
        _ => Ok(()),
    },
    lower: |operation, target, _| Ok(launches(operation, target)?.collect()),
    scratch_bytes: |_, _| 0,
};

/// Returns the launches that compute an operation.
pub(super) fn launches(
    operation: &TileOperation,
    target: Target,
) -> Result<impl Iterator<Item = Computation> + use<>, LaunchError> {
    Ok(operation.launches(target)?.into_iter().map(Computation::Launch))
}
