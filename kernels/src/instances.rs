//! Which images exist: kernels × sets of features × element types × tile widths × targets.

use std::fmt;

use crate::features::FeatureSet;
pub use crate::kernel::Kernel;
use crate::kernel::Task;

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

/// One image: a kernel for one set of features, element type, tile width and target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Instance {
    /// The kernel.
    pub kernel: Kernel,
    /// The features that its code has.
    pub features: FeatureSet,
    /// Type of the activations.
    pub element: Element,
    /// Columns of a tile, one of [`WIDTHS`].
    pub width: i32,
    /// What it was compiled for.
    pub target: Target,
}

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Instance { kernel, features, element, width, target } = self;
        write!(f, "{}{features}_", kernel.name())?;
        if kernel.spec().typed {
            write!(f, "{}_", element.name())?;
        }
        write!(f, "d{width}_{}", target.name())
    }
}

impl Instance {
    /// A kernel's image without features.
    pub const fn plain(kernel: Kernel, element: Element, width: i32, target: Target) -> Instance {
        Instance { kernel, features: FeatureSet::NONE, element, width, target }
    }

    /// All images.
    pub fn all() -> impl Iterator<Item = Instance> {
        Target::ALL.into_iter().flat_map(Instance::of_target)
    }

    /// All images of a target.
    pub fn of_target(target: Target) -> impl Iterator<Item = Instance> {
        let of_kernel = move |kernel: Kernel| {
            let sets = kernel.spec().features.iter();
            sets.flat_map(move |&features| {
                kernel.elements().iter().flat_map(move |&element| {
                    WIDTHS.map(|width| Instance { kernel, features, element, width, target })
                })
            })
        };
        Kernel::ALL.into_iter().flat_map(of_kernel).filter(Instance::exists)
    }

    /// Whether there is such an image. Of the passes over pairs, the sets with window or with all
    /// features have images everywhere. The other sets have images where models use them most: up to
    /// 128 columns, on Hopper and its successors in data centers, in bfloat16 except for the fused
    /// backward pass.
    fn exists(&self) -> bool {
        const FUSED_SEGMENTS: FeatureSet = FeatureSet::FUSED.and(FeatureSet::SEGMENTS);
        let Instance { kernel, features, element, width, target } = *self;
        let pairs = matches!(kernel.spec().task, Task::Keys | Task::Queries);
        match features {
            _ if kernel == Kernel::SegmentRanges => width == WIDTHS[0],
            _ if !pairs => true,
            FeatureSet::WINDOW | FeatureSet::ALL => true,
            _ if width > 128 => false,
            _ if !matches!(target, Target::Sm90 | Target::Sm100 | Target::Sm103) => false,
            // Slower than two kernels.
            features if width == 64 && features.has(FUSED_SEGMENTS) => false,
            features => element == Element::Bf16 || features == FeatureSet::FUSED,
        }
    }

    /// The image with the fewest features that computes what has `self.features`; none if that is to
    /// be a fused one and there is none.
    pub fn smallest(self) -> Option<Instance> {
        let sets = self.kernel.spec().features.iter().filter(|set| set.serves(self.features));
        sets.map(|&features| Instance { features, ..self }).find(Instance::exists)
    }

    /// Name of the function in the image.
    pub fn entry(&self) -> String {
        format!("{}_entry", self.kernel.name())
    }

    /// What the kernel is instantiated with, in its order: element type if it has one, tile sizes,
    /// and how it has each feature.
    pub fn generics(&self) -> Vec<String> {
        let TileShape { rows, keys, .. } = self.tile();
        let mut generics = Vec::new();
        let mut number = |number: i32| generics.push(number.to_string());
        if self.kernel == Kernel::SegmentRanges {
            // Blocks of rows that are looked at at once, and their rows.
            number(32);
            number(32 * rows);
            return generics;
        }
        number(rows);
        if keys > 0 {
            number(keys);
        }
        number(self.width);
        if self.kernel == Kernel::Forward {
            number(keys / self.lanes());
            number(self.lanes());
        }
        if self.kernel.spec().typed {
            generics.insert(0, self.element.name().to_owned());
        }
        if self.kernel.spec().task == Task::Keys {
            generics.push(i32::from(self.features.has(FeatureSet::FUSED)).to_string());
        }
        if matches!(self.kernel.spec().task, Task::Keys | Task::Queries) {
            use FeatureSet as F;
            let modes = [F::SEGMENTS, F::SOFT_CAP, F::SLOPES, F::DROPOUT];
            let window = if self.has_one_loop() { "2" } else { self.features.mode(F::WINDOW) };
            generics.push(window.to_owned());
            generics.extend(modes.map(|feature| self.features.mode(feature).to_owned()));
        }
        generics
    }
}
