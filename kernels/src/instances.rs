//! Which images exist: kernels × element types × tile widths × targets, and their tile shapes.

use std::fmt;

use crate::record::{
    Argument, DELTA, FINISH, FORWARD, FORWARD_GENERAL, JOIN, KEY_GRADS, KEY_GRADS_GENERAL,
    LINEAR_ATTEND, LINEAR_STATE, MERGE, QUERY_GRADS, QUERY_GRADS_GENERAL,
};

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kernel {
    /// Folds a rectangle of keys into the running softmax of its queries.
    Forward,
    /// Adds a rectangle's part to dk and dv.
    KeyGrads,
    /// Adds a rectangle's part to dq.
    QueryGrads,
    /// As [`Kernel::Forward`], with segments, a soft cap, ALiBi and dropout.
    ForwardGeneral,
    /// As [`Kernel::KeyGrads`], with segments, a soft cap, ALiBi and dropout.
    KeyGradsGeneral,
    /// As [`Kernel::QueryGrads`], with segments, a soft cap, ALiBi and dropout.
    QueryGradsGeneral,
    /// Per-row statistics for the backward pass.
    Delta,
    /// Adds two accumulators and casts.
    Finish,
    /// Adds an accumulator to another.
    Merge,
    /// Adds a running softmax state to another.
    Join,
    /// The states that parts of a sequence leave, in linear attention.
    LinearState,
    /// What tokens get in linear attention, given those states.
    LinearAttend,
}

impl Kernel {
    /// Those of softmax attention.
    pub const SOFTMAX: [Kernel; 10] = [
        Kernel::Forward,
        Kernel::KeyGrads,
        Kernel::QueryGrads,
        Kernel::ForwardGeneral,
        Kernel::KeyGradsGeneral,
        Kernel::QueryGradsGeneral,
        Kernel::Delta,
        Kernel::Finish,
        Kernel::Merge,
        Kernel::Join,
    ];

    /// Those of linear attention.
    pub const LINEAR: [Kernel; 2] = [Kernel::LinearState, Kernel::LinearAttend];

    /// All kernels.
    pub const ALL: [Kernel; 12] = {
        let mut all = [Kernel::LinearState; 12];
        let mut n = 0;
        while n < Kernel::SOFTMAX.len() {
            all[n] = Kernel::SOFTMAX[n];
            n += 1;
        }
        all[n] = Kernel::LINEAR[0];
        all[n + 1] = Kernel::LINEAR[1];
        all
    };

    /// Name of the kernel's function.
    pub const fn name(self) -> &'static str {
        match self {
            Kernel::Forward => "attention_fwd",
            Kernel::KeyGrads => "attention_bwd_dkdv",
            Kernel::QueryGrads => "attention_bwd_dq",
            Kernel::ForwardGeneral => "attention_fwd_general",
            Kernel::KeyGradsGeneral => "attention_bwd_dkdv_general",
            Kernel::QueryGradsGeneral => "attention_bwd_dq_general",
            Kernel::Delta => "delta",
            Kernel::Finish => "finish",
            Kernel::Merge => "merge",
            Kernel::Join => "join",
            Kernel::LinearState => "linear_state",
            Kernel::LinearAttend => "linear_attend",
        }
    }

    /// Its arguments in order.
    pub const fn arguments(self) -> &'static [Argument] {
        match self {
            Kernel::Forward => FORWARD,
            Kernel::KeyGrads => KEY_GRADS,
            Kernel::QueryGrads => QUERY_GRADS,
            Kernel::ForwardGeneral => FORWARD_GENERAL,
            Kernel::KeyGradsGeneral => KEY_GRADS_GENERAL,
            Kernel::QueryGradsGeneral => QUERY_GRADS_GENERAL,
            Kernel::Delta => DELTA,
            Kernel::Finish => FINISH,
            Kernel::Merge => MERGE,
            Kernel::Join => JOIN,
            Kernel::LinearState => LINEAR_STATE,
            Kernel::LinearAttend => LINEAR_ATTEND,
        }
    }

    /// The plain kernel that a general one does more than; any other is itself.
    pub const fn plain(self) -> Kernel {
        match self {
            Kernel::ForwardGeneral => Kernel::Forward,
            Kernel::KeyGradsGeneral => Kernel::KeyGrads,
            Kernel::QueryGradsGeneral => Kernel::QueryGrads,
            kernel => kernel,
        }
    }

    /// Has it a loop of matrix products?
    pub const fn is_attention(self) -> bool {
        !matches!(self, Kernel::Delta | Kernel::Finish | Kernel::Merge | Kernel::Join)
    }

    /// Is it of linear attention?
    pub const fn is_linear(self) -> bool {
        matches!(self, Kernel::LinearState | Kernel::LinearAttend)
    }

    /// Is it for activations of a type? Otherwise it has its images under [`Element::Bf16`] alone.
    pub const fn is_typed(self) -> bool {
        !matches!(self, Kernel::Merge)
    }

    /// The types of activations that it has images for.
    pub const fn elements(self) -> &'static [Element] {
        if self.is_typed() { &Element::ALL } else { &[Element::Bf16] }
    }
}

/// Type of the activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Element {
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl Element {
    /// Both types.
    pub const ALL: [Element; 2] = [Element::Bf16, Element::F16];

    /// Name in the kernels' language.
    pub const fn name(self) -> &'static str {
        match self {
            Element::Bf16 => "bf16",
            Element::F16 => "f16",
        }
    }
}

/// A GPU architecture that images are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// A100.
    Sm80,
    /// H100, H200.
    Sm90,
    /// B200, GB200.
    Sm100,
    /// B300, GB300.
    Sm103,
    /// RTX Blackwell.
    Sm120,
}

impl Target {
    /// All targets.
    pub const ALL: [Target; 5] =
        [Target::Sm80, Target::Sm90, Target::Sm100, Target::Sm103, Target::Sm120];

    /// Name as the assembler has it.
    pub const fn name(self) -> &'static str {
        match self {
            Target::Sm80 => "sm_80",
            Target::Sm90 => "sm_90",
            Target::Sm100 => "sm_100",
            Target::Sm103 => "sm_103",
            Target::Sm120 => "sm_120",
        }
    }

    /// The target of that name.
    ///
    /// # Errors
    /// If there is none; the message names those that there are.
    pub fn of_name(name: &str) -> Result<Target, String> {
        let found = Target::ALL.into_iter().find(|target| target.name() == name);
        found.ok_or_else(|| {
            let known = Target::ALL.map(Target::name).join(", ");
            format!("expected a target of {known}, got {name}")
        })
    }

    /// The target whose images run on a device of compute capability `major.minor`: images of
    /// 8.0 run on all of 8.x, the others on their own capability alone.
    pub fn of_capability(major: i32, minor: i32) -> Option<Target> {
        match (major, minor) {
            (8, _) => Some(Target::Sm80),
            (9, 0) => Some(Target::Sm90),
            (10, 0) => Some(Target::Sm100),
            (10, 3) => Some(Target::Sm103),
            (12, 0) => Some(Target::Sm120),
            _ => None,
        }
    }
}

/// Columns that a tile holds; a launch runs in the narrowest that holds all of an array's.
pub const WIDTHS: [i32; 3] = [64, 128, 256];

/// The narrowest tile width that holds so many columns.
pub fn width_of(columns: usize) -> Option<i32> {
    WIDTHS.into_iter().find(|&width| columns <= width as usize)
}

/// Shape of a block's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TileShape {
    /// Query rows; the rows of a kernel that has no keys; tokens.
    pub rows: i32,
    /// Key rows; 0 where a kernel has none. In linear attention columns of values.
    pub keys: i32,
    /// Warps that compute, beside those that load.
    pub warps: i32,
}

/// One image: a kernel for one element type, tile width and target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Instance {
    /// The kernel.
    pub kernel: Kernel,
    /// Type of the activations.
    pub element: Element,
    /// Columns of a tile, one of [`WIDTHS`].
    pub width: i32,
    /// What it was compiled for.
    pub target: Target,
}

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Instance { kernel, element, width, target } = self;
        write!(f, "{}_", kernel.name())?;
        if kernel.is_typed() {
            write!(f, "{}_", element.name())?;
        }
        write!(f, "d{width}_{}", target.name())
    }
}

impl Instance {
    /// All images.
    pub fn all() -> impl Iterator<Item = Instance> {
        Target::ALL.into_iter().flat_map(Instance::of_target)
    }

    /// All images of a target.
    pub fn of_target(target: Target) -> impl Iterator<Item = Instance> {
        Kernel::ALL.into_iter().flat_map(move |kernel| {
            kernel.elements().iter().flat_map(move |&element| {
                WIDTHS.map(|width| Instance { kernel, element, width, target })
            })
        })
    }

    /// Name of the function in the image.
    pub fn entry(&self) -> String {
        format!("{}_entry", self.kernel.name())
    }

    /// Its tile shape, chosen by what the compiler makes of it: no spills first, then, on sm_90, the
    /// cycles that the model gives its main loops. `quality.tsv` and `loops.tsv` have the outcome.
    pub fn tile(&self) -> TileShape {
        let tile = |rows, keys, warps| TileShape { rows, keys, warps };
        match (self.kernel, self.target, self.width) {
            // The general variants keep more tiles of pairs at once.
            (Kernel::KeyGradsGeneral, Target::Sm80 | Target::Sm120, 64) => tile(32, 64, 8),
            (Kernel::KeyGradsGeneral, Target::Sm80 | Target::Sm120, 128) => tile(16, 64, 8),
            (Kernel::QueryGradsGeneral, Target::Sm80, 64) => tile(64, 32, 8),
            (Kernel::QueryGradsGeneral, Target::Sm80, 128) => tile(64, 16, 8),
            (Kernel::KeyGradsGeneral, Target::Sm90, 128) => tile(64, 64, 8),
            (Kernel::QueryGradsGeneral, Target::Sm90, 64) => tile(128, 64, 8),
            (Kernel::QueryGradsGeneral, Target::Sm90, 256) => tile(64, 64, 8),
            (Kernel::QueryGradsGeneral, Target::Sm120, 128) => tile(64, 32, 8),
            (Kernel::ForwardGeneral, Target::Sm100 | Target::Sm103, 64) => tile(128, 64, 8),
            (Kernel::ForwardGeneral, Target::Sm100 | Target::Sm103, 128) => tile(128, 32, 8),
            (Kernel::QueryGradsGeneral, Target::Sm100 | Target::Sm103, 64) => tile(128, 64, 8),
            _ => self.plain_tile(),
        }
    }

    fn plain_tile(&self) -> TileShape {
        let tile = |rows, keys, warps| TileShape { rows, keys, warps };
        let blackwell = matches!(self.target, Target::Sm100 | Target::Sm103);
        match (self.kernel.plain(), self.target, self.width) {
            (kernel, target, width) if kernel.is_linear() => linear_tile(target, width),
            (kernel, _, width) if !kernel.is_attention() => {
                tile(if width == 256 { 32 } else { 64 }, 0, 4)
            }
            (Kernel::Forward, _, 64) => tile(128, 128, 8),
            (Kernel::Forward, Target::Sm80, 128) => tile(64, 64, 4),
            (Kernel::Forward, Target::Sm80, _) => tile(64, 32, 4),
            (Kernel::Forward, Target::Sm120, 256) => tile(64, 32, 8),
            (Kernel::Forward, _, 128) if blackwell => tile(128, 128, 8),
            (Kernel::Forward, _, 256) if blackwell => tile(64, 64, 8),
            (Kernel::Forward, _, _) => tile(128, 64, 8),
            (Kernel::KeyGrads, Target::Sm80, 64) => tile(64, 64, 8),
            (Kernel::KeyGrads, Target::Sm80, 128) => tile(32, 64, 8),
            (Kernel::KeyGrads, Target::Sm80, _) => tile(32, 32, 8),
            (Kernel::KeyGrads, Target::Sm120, 64) => tile(32, 128, 8),
            (Kernel::KeyGrads, Target::Sm120, 128) => tile(32, 64, 8),
            (Kernel::KeyGrads, Target::Sm120, _) => tile(16, 32, 4),
            (Kernel::KeyGrads, Target::Sm90, 128) => tile(128, 64, 8),
            (Kernel::KeyGrads, _, 256) if blackwell => tile(32, 32, 8),
            (Kernel::KeyGrads, _, 64 | 128) => tile(64, 128, 8),
            (Kernel::KeyGrads, _, _) => tile(32, 64, 8),
            (Kernel::QueryGrads, Target::Sm80, 64) => tile(64, 64, 4),
            (Kernel::QueryGrads, Target::Sm80, 128) => tile(64, 32, 8),
            (Kernel::QueryGrads, Target::Sm80, _) => tile(64, 16, 8),
            (Kernel::QueryGrads, Target::Sm120, 64) => tile(128, 64, 8),
            (Kernel::QueryGrads, Target::Sm120, 128) => tile(128, 32, 8),
            (Kernel::QueryGrads, Target::Sm120, _) => tile(32, 32, 4),
            (Kernel::QueryGrads, Target::Sm90, 64) => tile(128, 64, 8),
            (Kernel::QueryGrads, _, 64) => tile(128, 128, 8),
            (Kernel::QueryGrads, _, 128) => tile(128, 64, 8),
            (_, _, _) => tile(64, 64, 4),
        }
    }

    /// What the kernel is instantiated with: element type, if it has one, and tile sizes, in its order.
    pub fn generics(&self) -> Vec<String> {
        let TileShape { rows, keys, .. } = self.tile();
        let mut generics = Vec::new();
        if self.kernel.is_typed() {
            generics.push(self.element.name().to_owned());
        }
        generics.push(rows.to_string());
        if keys > 0 {
            generics.push(keys.to_string());
        }
        generics.push(self.width.to_string());
        generics
    }
}

/// Linear attention keeps a state of `width` rows and a tile's columns, which are the same on all
/// targets: callers make room for a row of products of each. Four warps do up to the width where the
/// compiler begins to spill.
fn linear_tile(target: Target, width: i32) -> TileShape {
    let most = match target {
        Target::Sm80 => 0,
        Target::Sm120 => 64,
        _ => 128,
    };
    TileShape { rows: 64, keys: 64, warps: if width > most { 8 } else { 4 } }
}
