//! The images that exist: kernels × variants × element types × tile widths × targets.

use std::fmt;

pub use crate::element::Element;
pub use crate::kernel::Kernel;
use crate::kernel::{Generic, Role};
pub use crate::target::Target;
use crate::tiles::{LATENT_PART, ROW_BLOCKS, has_one_loop, page_tile, sum_parts};
pub use crate::tiles::{LATENT_VALUES, LATENT_WIDTH, TileShape, WIDTHS, width_of};
use crate::variant::{Decays, FeatureSet, Variant};

/// The widest tiles of kernels for decays of channels.
pub const CHANNEL_WIDTH: i32 = 128;

/// One image: a kernel in one variant, for one element type, tile width and target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Instance {
    /// The kernel.
    pub kernel: Kernel,
    /// What it is made for.
    pub variant: Variant,
    /// Type of the activations.
    pub element: Element,
    /// Columns of a tile, one of [`WIDTHS`].
    pub width: i32,
    /// The architecture that it is compiled for.
    pub target: Target,
}

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Instance { kernel, variant, element, width, target } = self;
        write!(f, "{}{variant}_", kernel.name())?;
        if kernel.is_typed() {
            write!(f, "{}_", element.name())?;
        }
        write!(f, "d{width}_{}", target.name())
    }
}

impl Instance {
    /// Returns a kernel's image of the variant without features.
    pub const fn plain(kernel: Kernel, element: Element, width: i32, target: Target) -> Instance {
        Instance { kernel, variant: Variant::PLAIN, element, width, target }
    }

    /// Returns all images.
    pub fn all() -> impl Iterator<Item = Instance> {
        Target::ALL.into_iter().flat_map(Instance::of_target)
    }

    /// Returns all images of a target.
    pub fn of_target(target: Target) -> impl Iterator<Item = Instance> {
        let of_kernel = move |kernel: Kernel| {
            kernel.spec().variants.iter().flat_map(move |&variant| {
                kernel.elements().iter().flat_map(move |&element| {
                    let widths = kernel.spec().widths.iter();
                    widths.map(move |&width| Instance { kernel, variant, element, width, target })
                })
            })
        };
        Kernel::ALL.into_iter().flat_map(of_kernel).filter(Instance::exists)
    }

    /// Whether there is an image of the kernel's variant.
    pub(crate) fn is_made(&self) -> bool {
        self.kernel.spec().variants.contains(&self.variant) && self.exists()
    }

    /// Whether the image exists. In softmax attention over pairs of tiles, the variant with the
    /// window alone and those with all features have images everywhere. The other variants have
    /// images where models use them most: up to 128 columns, on Hopper and its successors in data
    /// centers, in bfloat16 except for the fused backward pass.
    fn exists(&self) -> bool {
        let Instance { kernel, variant, element, width, target } = *self;
        if variant.decays != Decays::Heads {
            return width <= CHANNEL_WIDTH;
        }
        // Wider tiles always have many rows.
        if variant.many_rows || variant.short_pages {
            return width <= 128;
        }
        if !kernel.has_pairs() || variant == Variant::WINDOW || variant.is_general() {
            return true;
        }
        let common = width <= 128 && matches!(target, Target::Sm90 | Target::Sm100 | Target::Sm103);
        // Slower than two kernels.
        let slow = variant.fused && variant.has(FeatureSet::SEGMENTS) && width == 64;
        common && !slow && (element == Element::Bf16 || variant == Variant::FUSED)
    }

    /// Returns the image with the fewest features that computes a launch that wants `self.variant`;
    /// `None` if no fused image computes a fused launch.
    pub fn smallest(self) -> Option<Instance> {
        let variants = self.kernel.spec().variants.iter();
        let serving = variants.filter(|variant| variant.serves(self.variant));
        serving.map(|&variant| Instance { variant, ..self }).find(Instance::exists)
    }

    /// Returns the name of the function in the image.
    pub fn entry(&self) -> String {
        format!("{}_entry", self.kernel.name())
    }

    /// Returns the image's tile shape.
    pub fn tile(&self) -> TileShape {
        (self.kernel.spec().tile)(self.variant, self.target, self.width)
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
        let Instance { kernel, variant, width, target, .. } = *self;
        let TileShape { rows, keys, .. } = self.tile();
        match generic {
            Generic::Element => vec![],
            Generic::Rows => vec![rows],
            Generic::Tile if keys == 0 => vec![rows, width],
            Generic::Tile => vec![rows, keys, width],
            Generic::Parts if kernel.spec().role == Role::Decode => {
                let wide = kernel == Kernel::Decode && page_tile(variant, width) < keys;
                let parts = if wide { 16 } else { 8 };
                vec![keys / parts, parts]
            }
            Generic::Parts => vec![keys / sum_parts(width), sum_parts(width)],
            Generic::Latents => vec![rows, keys, LATENT_PART, LATENT_WIDTH - LATENT_VALUES],
            Generic::PageTile => vec![page_tile(variant, width).min(keys)],
            Generic::Fused => vec![variant.fused.into()],
            Generic::Decays => vec![variant.decays as i32],
            Generic::Blocks => vec![ROW_BLOCKS, ROW_BLOCKS * 64],
            Generic::Features => {
                let one_loop = kernel.spec().role == Role::Keys && has_one_loop(target, width);
                let window = if one_loop { 2 } else { variant.window_mode() };
                let modes = FeatureSet::SWITCHES.map(|feature| variant.mode(feature));
                [&[window], &modes[..]].concat()
            }
        }
    }
}
