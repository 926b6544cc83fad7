//! The backend of this library's own kernels. It serves every operation, except that a fused kernel
//! exists for some features and widths only.

use super::{Backend, Computation};
use crate::launch::TileOperation;

/// The backend.
pub const BACKEND: Backend = Backend {
    name: "tile",
    serves: |operation, target| match operation {
        TileOperation::KeyGrads(tile) if tile.dq_acc.is_some() => tile.can_fuse(target),
        _ => Ok(()),
    },
    lower: |operation, target| {
        let launches = operation.launches(target)?;
        Ok(launches.into_iter().map(Computation::Launch).collect())
    },
};
