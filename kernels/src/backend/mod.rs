//! The backends: kinds of code that compute operations, and the choice among them.
//!
//! [`BACKENDS`] is the only list of them. [`Backends::choose`] asks each, in this order, whether it
//! serves an operation; the first that does lowers it. The choice follows from static facts alone:
//! sizes, types, features, the target and the version of cuDNN. So it is the same whenever the same
//! call is recorded, and on all ranks that have the same cuDNN. Ranks may also choose differently:
//! what they exchange does not depend on it.

pub mod cudnn;
pub mod tile;

use std::borrow::Cow;
use std::fmt;

pub use cudnn::Version;

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

/// The reason why a backend does not compute an operation: a clause without a full stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reason(pub Cow<'static, str>);

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

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

/// The backend of an operation, and why backends before it refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The name of the operation.
    pub operation: &'static str,
    /// The name of the first backend that serves the operation; `None` if all refuse.
    pub backend: Option<&'static str>,
    /// The names of backends that refused, with their reasons.
    pub refusals: Vec<(&'static str, Reason)>,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {}", self.operation, self.backend.unwrap_or("none"))?;
        if self.refusals.is_empty() {
            return Ok(());
        }
        let refusals = self.refusals.iter().map(|(name, reason)| format!("{name}: {reason}"));
        write!(f, " ({})", refusals.collect::<Vec<_>>().join("; "))
    }
}

/// Choices that were made, each with the number of operations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choices(Vec<(Choice, usize)>);

impl Choices {
    /// Adds a choice for `count` operations.
    pub fn add(&mut self, choice: Choice, count: usize) {
        match self.0.iter_mut().find(|(known, _)| *known == choice) {
            Some((_, all)) => *all += count,
            None => self.0.push((choice, count)),
        }
    }

    /// Adds all of `other`.
    pub fn extend(&mut self, other: Choices) {
        other.0.into_iter().for_each(|(choice, count)| self.add(choice, count));
    }

    /// Returns the choices in the order in which they first came.
    pub fn iter(&self) -> impl Iterator<Item = &(Choice, usize)> {
        self.0.iter()
    }

    /// Whether no choice was made.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Choice> for Choices {
    fn from(choice: Choice) -> Choices {
        Choices(vec![(choice, 1)])
    }
}

/// Lists the choices without their numbers, which differ from rank to rank.
impl fmt::Display for Choices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<_> = self.iter().map(|(choice, _)| choice.to_string()).collect();
        f.write_str(&all.join(", "))
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
    /// Returns the first backend that serves an operation, and the choice as users may read it.
    pub fn choose(&self, operation: &TileOperation) -> (Option<&'static Backend>, Choice) {
        let mut refusals = Vec::new();
        let serves = |backend: &&'static Backend| match self.serves(backend, operation) {
            Ok(()) => true,
            Err(reason) => {
                refusals.push((backend.name, reason));
                false
            }
        };
        let mut allowed = self.all.iter().filter(|backend| self.kernels.allow(backend));
        let chosen = allowed.find(serves);
        let (operation, backend) = (operation.name(), chosen.map(|backend| backend.name));
        (chosen, Choice { operation, backend, refusals })
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
