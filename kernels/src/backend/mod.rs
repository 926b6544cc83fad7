//! The backends: kinds of code that compute operations, and the choice among them.
//!
//! [`BACKENDS`] is the only list of them. [`Backends::choose`] asks each, in this order, whether it
//! serves an operation. The first that does lowers it, or the one that is predicted to take least
//! time ([`Kernels`]). The choice follows from static facts alone: sizes, types, features, the target
//! and the version of cuDNN. So it is the same whenever the same call is recorded, and on all ranks
//! that have the same cuDNN. Ranks may also choose differently: what they exchange does not depend on
//! it.

mod choice;
pub mod cudnn;
mod known;
pub mod tile;

pub use choice::{Choice, Choices, MARGIN, Reason, Refusal};
pub use cudnn::Version;

use crate::cost::Cost;
use crate::error::LaunchError;
use crate::launch::{Footprint, Launch, Rectangle, TileOperation};
use crate::names::named;
use crate::target::Target;

named! {
    /// The backends that a call may take.
    Kernels, "kernels" {
        /// This library's own kernels.
        Tile = "tile",
        /// cuDNN where it serves an operation, otherwise this library's own kernels.
        Cudnn = "cudnn",
        /// What is predicted to compute an operation in the least time; this library's own kernels
        /// without a prediction, and where others are hardly faster.
        Auto = "auto",
    }
}

/// One kind of code that computes operations.
#[derive(Debug)]
pub struct Backend {
    /// The name that users read.
    pub name: &'static str,
    /// Says whether the backend computes an operation on a target, or why it does not. It must not
    /// read addresses: whether an array is given is a static fact, where the array lies is none.
    pub serves: fn(&TileOperation, Target) -> Result<(), Reason>,
    /// Returns the oldest version of cuDNN that can compute an operation; `None` if the backend needs
    /// no cuDNN.
    pub needs: fn(&TileOperation, Target) -> Option<Version>,
    /// Predicts what an operation costs that the backend serves, if anything is known.
    pub cost: fn(&TileOperation, Target) -> Option<Cost>,
    /// Returns what computes an operation that the backend serves, in the order of a stream. It may
    /// use scratch memory from an address on.
    pub lower: fn(&TileOperation, Target, u64) -> Result<Vec<Computation>, LaunchError>,
    /// Returns bytes of scratch memory that are enough for a pass over a rectangle, on any target.
    pub scratch_bytes: fn(&Rectangle, TilePass) -> u64,
}

/// A pass over a rectangle of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TilePass {
    /// [`TileOperation::Forward`].
    Forward,
    /// [`TileOperation::KeyGrads`] and [`TileOperation::QueryGrads`].
    Backward,
}

/// All backends, the preferred one first.
pub const BACKENDS: &[Backend] = &[cudnn::BACKEND, tile::BACKEND];

/// What a backend puts on a stream.
#[derive(Debug, Clone, PartialEq)]
pub enum Computation {
    /// A launch of a kernel.
    Launch(Launch),
    /// A call of a library that launches kernels of its own.
    Library(LibraryCall),
}

impl Computation {
    /// Returns all memory that the computation may touch.
    pub fn footprint(&self) -> Vec<Footprint> {
        match self {
            Computation::Launch(launch) => launch.footprint(),
            Computation::Library(call) => call.footprint().collect(),
        }
    }
}

/// A call of a library.
#[derive(Debug, Clone, PartialEq)]
pub struct LibraryCall {
    /// The library.
    pub library: &'static str,
    /// What the library prepares once for a device, in words of its own. It has no addresses.
    pub plan: String,
    /// The arrays, workspace included, each with its number in the plan.
    pub arrays: Vec<(i64, Footprint)>,
}

impl LibraryCall {
    /// Returns all memory that the call may touch.
    pub fn footprint(&self) -> impl Iterator<Item = Footprint> {
        self.arrays.iter().map(|(_, array)| array.clone())
    }
}

/// The backends of a device.
#[derive(Debug, Clone, Copy)]
pub struct Backends {
    /// The backends, the preferred one first.
    pub all: &'static [Backend],
    /// The device's architecture.
    pub target: Target,
    /// Which of them a call may take.
    pub kernels: Kernels,
    /// The version of cuDNN that the process has; `None` where that is unknown, and the newest
    /// counts.
    pub cudnn: Option<Version>,
    /// The address of scratch memory.
    pub scratch: u64,
}

impl Kernels {
    /// Whether a call may take a backend.
    fn allow(self, backend: &Backend) -> bool {
        self != Kernels::Tile || backend.name == tile::NAME
    }

    /// Returns bytes of scratch memory that are enough for a pass over a rectangle, on any target.
    pub fn scratch_bytes(self, rectangle: &Rectangle, pass: TilePass) -> u64 {
        let allowed = BACKENDS.iter().filter(|backend| self.allow(backend));
        let bytes = allowed.map(|backend| (backend.scratch_bytes)(rectangle, pass));
        bytes.max().unwrap_or_default()
    }
}

impl Backends {
    /// Returns the backend that computes an operation, and the choice as users may read it.
    pub fn choose(&self, operation: &TileOperation) -> (Option<&'static Backend>, Choice) {
        let (mut served, mut refusals) = (Vec::new(), Vec::new());
        for backend in self.all.iter().filter(|backend| self.kernels.allow(backend)) {
            match self.serves(backend, operation) {
                Ok(()) => served.push((backend, known::cost(backend, operation, self.target))),
                Err(reason) => refusals.push((backend.name, Refusal::Unserved(reason))),
            }
            if self.kernels != Kernels::Auto && !served.is_empty() {
                break;
            }
        }
        let chosen = (!served.is_empty()).then(|| served.remove(cheapest(&served)));
        let of_chosen = chosen.and_then(|(_, cost): (_, Option<Cost>)| cost);
        let slower = |(backend, cost): (&Backend, Option<Cost>)| {
            let is_close = |cost: Cost| of_chosen.is_some_and(|one| cost.seconds < one.seconds);
            let refusal = |cost| match is_close(cost) {
                true => Refusal::Close(cost),
                false => Refusal::Slower(cost),
            };
            (backend.name, cost.map_or(Refusal::UNPREDICTED, refusal))
        };
        refusals.extend(served.into_iter().map(slower));
        let (backend, cost) = chosen.unzip();
        let (operation, name) = (operation.name(), backend.map(|backend: &Backend| backend.name));
        (backend, Choice { operation, backend: name, cost: cost.flatten(), refusals })
    }

    /// Says whether a backend computes an operation with the cuDNN that the process has. All reasons
    /// count: one may follow from another, as where older versions do not compute all gradients of a
    /// tile at once.
    fn serves(&self, backend: &Backend, operation: &TileOperation) -> Result<(), Reason> {
        let answer = (backend.serves)(operation, self.target);
        let (Some(got), Some(oldest)) = (self.cudnn, (backend.needs)(operation, self.target))
        else {
            return answer;
        };
        if got >= oldest {
            return answer;
        }
        let reason = format!("it needs version {oldest} or newer for this, got {got}");
        Err(match answer {
            Ok(()) => Reason(reason.into()),
            Err(other) => Reason(format!("{other}; {reason}").into()),
        })
    }

    /// Returns what computes an operation, and the choice.
    ///
    /// # Errors
    /// [`LaunchError`], if no backend serves the operation, or the backend can't describe it.
    pub fn lower(
        &self,
        operation: &TileOperation,
    ) -> Result<(Vec<Computation>, Choice), LaunchError> {
        let (backend, choice) = self.choose(operation);
        let Some(backend) = backend else {
            return Err(LaunchError::Unserved(choice));
        };
        Ok(((backend.lower)(operation, self.target, self.scratch)?, choice))
    }
}

/// Returns the place of the backend that is known to cost least, where others have to be faster than
/// this library's own kernels by [`MARGIN`]; if nothing is known, of own kernels.
fn cheapest(served: &[(&Backend, Option<Cost>)]) -> usize {
    let share = |at: &usize| if served[*at].0.name == tile::NAME { 1.0 - MARGIN } else { 1.0 };
    let seconds = |at: &usize| served[*at].1.map_or(f64::INFINITY, |cost| share(at) * cost.seconds);
    let least = (0..served.len()).min_by(|one, other| seconds(one).total_cmp(&seconds(other)));
    let own = || served.iter().position(|(backend, _)| backend.name == tile::NAME);
    least.filter(|at| served[*at].1.is_some()).or_else(own).unwrap_or_default()
}
