//! The images that exist: kernels × sets of features × element types × tile widths × targets.

use std::fmt;

pub use crate::element::Element;
use crate::features::FeatureSet;
pub use crate::kernel::Kernel;
use crate::kernel::{Generic, Role};
pub use crate::target::Target;
use crate::tiles::{ROW_BLOCKS, has_one_loop, page_tile, sum_parts};
pub use crate::tiles::{TileShape, WIDTHS, width_of};

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
    /// The architecture that it is compiled for.
    pub target: Target,
}

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Instance { kernel, features, element, width, target } = self;
        write!(f, "{}{features}_", kernel.name())?;
        if kernel.is_typed() {
            write!(f, "{}_", element.name())?;
        }
        write!(f, "d{width}_{}", target.name())
    }
}

impl Instance {
    /// Returns a kernel's image without features.
    pub const fn plain(kernel: Kernel, element: Element, width: i32, target: Target) -> Instance {
        Instance { kernel, features: FeatureSet::NONE, element, width, target }
    }

    /// Returns all images.
    pub fn all() -> impl Iterator<Item = Instance> {
        Target::ALL.into_iter().flat_map(Instance::of_target)
    }

    /// Returns all images of a target.
    pub fn of_target(target: Target) -> impl Iterator<Item = Instance> {
        let of_kernel = move |kernel: Kernel| {
            kernel.spec().features.iter().flat_map(move |&features| {
                kernel.elements().iter().flat_map(move |&element| {
                    let widths = kernel.spec().widths.iter();
                    widths.map(move |&width| Instance { kernel, features, element, width, target })
                })
            })
        };
        Kernel::ALL.into_iter().flat_map(of_kernel).filter(Instance::exists)
    }

    /// Whether the image exists. In softmax attention over pairs of tiles, the set with the window
    /// alone and the sets with all features have images everywhere. The other sets have images where
    /// models use them most: up to 128 columns, on Hopper and its successors in data centers, in
    /// bfloat16 except for the fused backward pass.
    fn exists(&self) -> bool {
        const MASKED_ALL: FeatureSet = FeatureSet::ALL.and(FeatureSet::VISIBLE);
        const FUSED_SEGMENTS: FeatureSet = FeatureSet::FUSED.and(FeatureSet::SEGMENTS);
        let Instance { kernel, features, element, width, target } = *self;
        match features {
            // Wider tiles always have many rows.
            FeatureSet::MANY_ROWS | FeatureSet::SHORT_PAGES => width <= 128,
            _ if !kernel.has_pairs() => true,
            FeatureSet::WINDOW | FeatureSet::ALL | MASKED_ALL => true,
            _ if width > 128 => false,
            _ if !matches!(target, Target::Sm90 | Target::Sm100 | Target::Sm103) => false,
            // Slower than two kernels.
            features if width == 64 && features.has(FUSED_SEGMENTS) => false,
            features => element == Element::Bf16 || features == FeatureSet::FUSED,
        }
    }

    /// Returns the image with the fewest features that computes a launch with `self.features`;
    /// `None` if no fused image computes a fused launch.
    pub fn smallest(self) -> Option<Instance> {
        let sets = self.kernel.spec().features.iter().filter(|set| set.serves(self.features));
        sets.map(|&features| Instance { features, ..self }).find(Instance::exists)
    }

    /// Returns the name of the function in the image.
    pub fn entry(&self) -> String {
        format!("{}_entry", self.kernel.name())
    }

    /// Returns the image's tile shape.
    pub fn tile(&self) -> TileShape {
        (self.kernel.spec().tile)(self.features, self.target, self.width)
    }

    /// Returns the values of the kernel's generics, in their order.
    pub fn generics(&self) -> Vec<String> {
        let mut values = Vec::new();
        for generic in self.kernel.spec().generics {
            match generic {
                Generic::Element => values.push(self.element.name().to_owned()),
                _ => values.extend(self.numbers(*generic).iter().map(i32::to_string)),
            }
        }
        values
    }

    fn numbers(&self, generic: Generic) -> Vec<i32> {
        let Instance { kernel, features, width, target, .. } = *self;
        let TileShape { rows, keys, .. } = self.tile();
        match generic {
            Generic::Element => vec![],
            Generic::Tile if keys == 0 => vec![rows, width],
            Generic::Tile => vec![rows, keys, width],
            Generic::Parts if kernel.spec().role == Role::Decode => {
                let parts = if page_tile(features, width) < keys { 16 } else { 8 };
                vec![keys / parts, parts]
            }
            Generic::Parts => vec![keys / sum_parts(width), sum_parts(width)],
            Generic::PageTile => vec![page_tile(features, width).min(keys)],
            Generic::Fused => vec![features.has(FeatureSet::FUSED).into()],
            Generic::Blocks => vec![ROW_BLOCKS, ROW_BLOCKS * 64],
            Generic::Features => {
                let one_loop = kernel.spec().role == Role::Keys && has_one_loop(target, width);
                let window = if one_loop { 2 } else { features.mode(FeatureSet::WINDOW) };
                let modes = FeatureSet::SWITCHES.map(|feature| features.mode(feature));
                [&[window], &modes[..]].concat()
            }
        }
    }
}
