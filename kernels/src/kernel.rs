//! The kernels: one row each.

use crate::element::Element;
use crate::record::{self, Argument, Meaning};
use crate::target::Target;
use crate::tiles::{self, LATENT_PART, LATENT_VALUES, LATENT_WIDTH, TileShape, WIDTHS};
use crate::variant::{FeatureSet, Variant};

/// The role of a kernel in a computation, which blocks and checks depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Softmax attention over pairs of tiles. Blocks keep queries and stream keys.
    Queries,
    /// Softmax attention over pairs of tiles. Blocks keep keys and stream queries.
    Keys,
    /// Linear attention.
    Linear,
    /// Decode over pages.
    Decode,
    /// Sums of the pieces of decode.
    DecodeMerge,
    /// A computation for each row.
    Rows,
}

/// A generic of a kernel, or a group of generics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generic {
    /// Type of the activations.
    Element,
    /// Rows of a tile, keys if the kernel has keys, and columns.
    Tile,
    /// Rows of a tile.
    Rows,
    /// Keys of a tile that one part of a row's sum has, and the number of parts.
    Parts,
    /// Keys of a tile that lies within a page.
    PageTile,
    /// Rows of a tile, keys, columns of keys that are the values, and other columns of keys.
    Latents,
    /// Whether the kernel adds to dq.
    Fused,
    /// What has a decay.
    Decays,
    /// The mode of the window, and then the mode of each other feature.
    Features,
    /// Blocks of rows that the kernel compares at once, and their rows together.
    Blocks,
}

/// The row of a kernel.
#[derive(Debug)]
pub struct KernelSpec {
    /// Name of its function.
    pub name: &'static str,
    /// The module with its source.
    pub module: &'static str,
    /// Its arguments in order.
    pub arguments: &'static [Argument],
    /// Its role in a computation.
    pub role: Role,
    /// Its generics in order.
    pub generics: &'static [Generic],
    /// The variants that it has images for, those of fewer features first.
    pub variants: &'static [Variant],
    /// The tile widths that it has images for.
    pub widths: &'static [i32],
    /// The tile shape of its image of a variant, for a target and a width.
    pub tile: fn(Variant, Target, i32) -> TileShape,
}

impl KernelSpec {
    /// Returns the row of a kernel that computes something for each row: with an image for each
    /// element type and width, and without features.
    const fn rows(
        name: &'static str,
        module: &'static str,
        arguments: &'static [Argument],
    ) -> KernelSpec {
        KernelSpec {
            name,
            module,
            arguments,
            role: Role::Rows,
            generics: &[Generic::Element, Generic::Tile],
            variants: &[Variant::PLAIN],
            widths: &WIDTHS,
            tile: tiles::rows,
        }
    }
}

/// Generics of kernels of linear attention with decays of more than one kind.
const OF_DECAYS: &[Generic] = &[Generic::Element, Generic::Tile, Generic::Decays];

/// Variants for decays of heads, and of columns of keys.
const OF_HEADS_OR_KEYS: &[Variant] = &[Variant::PLAIN, Variant::KEY_CHANNELS];

/// Variants that models use.
const PASS: &[Variant] = KEY_PASS.split_at(8).0;

const KEY_PASS: &[Variant] = &[
    Variant::PLAIN,
    Variant::WINDOW,
    Variant::WINDOW.with(FeatureSet::SEGMENTS),
    Variant::WINDOW.with(FeatureSet::SOFT_CAP),
    Variant::WINDOW.with(FeatureSet::SLOPES),
    Variant::GENERAL,
    Variant::MASKS,
    Variant::GENERAL.with(FeatureSet::VISIBLE),
    Variant::FUSED,
    Variant { window: true, ..Variant::FUSED.with(FeatureSet::SEGMENTS) },
];

/// Declares [`Kernel`] with a row for each variant.
macro_rules! kernels {
    ($($(#[$doc:meta])+ $kernel:ident => $spec:expr;)+) => {
        /// A kernel.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Kernel {
            $($(#[$doc])+ $kernel,)+
        }

        impl Kernel {
            /// All kernels.
            pub const ALL: [Kernel; [$(Kernel::$kernel),+].len()] = [$(Kernel::$kernel),+];

            /// Returns the kernel's row.
            pub fn spec(self) -> &'static KernelSpec {
                static SPECS: [KernelSpec; Kernel::ALL.len()] = [$($spec),+];
                &SPECS[self as usize]
            }
        }
    };
}

kernels! {
    /// Folds a rectangle of keys into the running softmax of its queries.
    Forward => KernelSpec {
        role: Role::Queries,
        generics: &[Generic::Element, Generic::Tile, Generic::Parts, Generic::Features],
        variants: PASS,
        tile: tiles::forward,
        ..KernelSpec::rows("attention_fwd", "forward", record::FORWARD)
    };
    /// Adds a rectangle's part to dk and dv; with [`Variant::fused`] also to dq.
    KeyGrads => KernelSpec {
        role: Role::Keys,
        generics: &[Generic::Element, Generic::Tile, Generic::Fused, Generic::Features],
        variants: KEY_PASS,
        tile: tiles::key_grads,
        ..KernelSpec::rows("attention_bwd_dkdv", "backward_keys", record::KEY_GRADS)
    };
    /// Adds a rectangle's part to dq.
    QueryGrads => KernelSpec {
        role: Role::Queries,
        generics: &[Generic::Element, Generic::Tile, Generic::Features],
        variants: PASS,
        tile: tiles::query_grads,
        ..KernelSpec::rows("attention_bwd_dq", "backward_queries", record::QUERY_GRADS)
    };
    /// Finds which rows the segments of a block's rows let them see.
    SegmentRanges => KernelSpec {
        generics: &[Generic::Blocks],
        widths: &[64],
        tile: tiles::segment_ranges,
        ..KernelSpec::rows("segment_ranges", "segments", record::SEGMENT_RANGES)
    };
    /// Packs what masks as data say of each row of a side.
    MaskRows => KernelSpec {
        generics: &[Generic::Blocks],
        widths: &[64],
        tile: tiles::mask_rows,
        ..KernelSpec::rows("mask_rows", "masks", record::MASK_ROWS)
    };
    /// Finds which rows masks as data let a block's rows see.
    MaskRuns => KernelSpec {
        generics: &[Generic::Blocks],
        widths: &[64],
        tile: tiles::mask_runs,
        ..KernelSpec::rows("mask_runs", "masks", record::MASK_RUNS)
    };
    /// Computes statistics of each row for the backward pass.
    Delta => KernelSpec::rows("delta", "rows", record::DELTA);
    /// Adds two accumulators and casts the sum.
    Cast => KernelSpec::rows("cast", "rows", record::CAST);
    /// Adds an accumulator to another one.
    Accumulate => KernelSpec {
        generics: &[Generic::Tile],
        ..KernelSpec::rows("accumulate", "rows", record::ACCUMULATE)
    };
    /// Adds a rounded gradient to an accumulator.
    AddGradient => KernelSpec::rows("add_gradient", "rows", record::ADD_GRADIENT);
    /// Writes lse head by head.
    PackLse => KernelSpec {
        generics: &[Generic::Rows],
        widths: &[64],
        tile: tiles::pack_lse,
        ..KernelSpec::rows("pack_lse", "rows", record::PACK_LSE)
    };
    /// Adds a running softmax state to another one.
    CombineSoftmax =>
        KernelSpec::rows("combine_softmax", "combine_softmax", record::COMBINE_SOFTMAX);
    /// Adds a result of attention to a running softmax state.
    FoldResult => KernelSpec::rows("fold_result", "combine_softmax", record::FOLD_RESULT);
    /// Computes the states that parts of a sequence leave, in linear attention.
    LinearState => KernelSpec {
        role: Role::Linear,
        generics: OF_DECAYS,
        variants: OF_HEADS_OR_KEYS,
        tile: tiles::linear,
        ..KernelSpec::rows("linear_state", "linear", record::LINEAR_STATE)
    };
    /// Computes the outputs of tokens from these states, in linear attention.
    LinearAttend => KernelSpec {
        role: Role::Linear,
        generics: OF_DECAYS,
        variants: &[Variant::PLAIN, Variant::KEY_CHANNELS, Variant::VALUE_CHANNELS],
        tile: tiles::linear,
        ..KernelSpec::rows("linear_attend", "linear", record::LINEAR_ATTEND)
    };
    /// Computes the pairs of each tile under decays of channels, in linear attention.
    ChannelPairs => KernelSpec {
        role: Role::Linear,
        variants: &[Variant::KEY_CHANNELS],
        tile: tiles::channel_pairs,
        ..KernelSpec::rows("channel_pairs", "channels", record::CHANNEL_PAIRS)
    };
    /// Computes the inverse of each tile, in the delta rule.
    DeltaRuleInverse => KernelSpec {
        role: Role::Linear,
        generics: OF_DECAYS,
        variants: OF_HEADS_OR_KEYS,
        tile: tiles::delta_inverse,
        ..KernelSpec::rows("delta_rule_inverse", "delta_inverse", record::DELTA_RULE_INVERSE)
    };
    /// Computes what parts of a sequence do to states, or corrected values, in the delta rule.
    DeltaRuleState => KernelSpec {
        role: Role::Linear,
        generics: OF_DECAYS,
        variants: OF_HEADS_OR_KEYS,
        tile: tiles::linear,
        ..KernelSpec::rows("delta_rule_state", "delta_rule", record::DELTA_RULE_STATE)
    };
    /// Computes what parts of a sequence do to gradients of states, or gradients of values, in the
    /// delta rule.
    DeltaRuleGrad => KernelSpec {
        role: Role::Linear,
        generics: OF_DECAYS,
        variants: OF_HEADS_OR_KEYS,
        tile: tiles::delta_grad,
        ..KernelSpec::rows("delta_rule_grad", "delta_rule", record::DELTA_RULE_GRAD)
    };
    /// Computes the gradient of keys from gradients of states, in the delta rule.
    DeltaRuleKeys => KernelSpec {
        role: Role::Linear,
        generics: OF_DECAYS,
        variants: OF_HEADS_OR_KEYS,
        tile: tiles::delta_keys,
        ..KernelSpec::rows("delta_rule_keys", "delta_keys", record::DELTA_RULE_KEYS)
    };
    /// Computes the pieces of decode.
    Decode => KernelSpec {
        role: Role::Decode,
        generics: &[Generic::Element, Generic::Tile, Generic::Parts, Generic::PageTile],
        variants: &[Variant::PLAIN, Variant::MANY_ROWS, Variant::SHORT_PAGES],
        tile: tiles::decode,
        ..KernelSpec::rows("decode", "decode", record::DECODE)
    };
    /// Computes the pieces of decode where values are the first columns of the keys.
    DecodeLatents => KernelSpec {
        role: Role::Decode,
        generics: &[Generic::Element, Generic::Latents, Generic::Parts],
        widths: &[LATENT_WIDTH],
        tile: tiles::decode_latents,
        ..KernelSpec::rows("decode_latents", "decode_latents", record::DECODE_LATENTS)
    };
    /// Computes the weights of decode over latents, in memory.
    LatentWeights => KernelSpec {
        role: Role::Decode,
        generics: &[Generic::Element, Generic::Latents],
        widths: &[LATENT_WIDTH],
        tile: tiles::latent_weights,
        ..KernelSpec::rows("latent_weights", "latent_weights", record::LATENT_WEIGHTS)
    };
    /// Computes the pieces of decode over latents from these weights.
    LatentValues => KernelSpec {
        role: Role::Decode,
        widths: &[LATENT_PART],
        tile: tiles::latent_values,
        ..KernelSpec::rows("latent_values", "latent_values", record::LATENT_VALUES)
    };
    /// Adds the pieces of decode.
    DecodeMerge => KernelSpec {
        role: Role::DecodeMerge,
        generics: &[Generic::Tile],
        widths: &[64, 128, 256, LATENT_VALUES],
        tile: tiles::decode_merge,
        ..KernelSpec::rows("decode_merge", "decode_merge", record::DECODE_MERGE)
    };
}

impl Kernel {
    /// Returns the name of the kernel's function.
    pub fn name(self) -> &'static str {
        self.spec().name
    }

    /// Returns the kernel's arguments in order.
    pub fn arguments(self) -> &'static [Argument] {
        self.spec().arguments
    }

    /// Returns the first argument of a meaning and its position in the record.
    pub(crate) fn find(self, meaning: Meaning) -> Option<(usize, &'static Argument)> {
        self.arguments().iter().enumerate().find(|(_, argument)| argument.meaning == meaning)
    }

    /// Whether the kernel has a loop of matrix products.
    pub fn has_products(self) -> bool {
        !matches!(self.spec().role, Role::Rows | Role::DecodeMerge)
    }

    /// Whether the kernel computes softmax attention over pairs of tiles.
    pub fn has_pairs(self) -> bool {
        matches!(self.spec().role, Role::Queries | Role::Keys)
    }

    /// Whether the kernel is of linear attention.
    pub fn is_linear(self) -> bool {
        self.spec().role == Role::Linear
    }

    /// Whether the kernel is compiled for each type of activations. Otherwise it has images for
    /// [`Element::Bf16`] alone.
    pub fn is_typed(self) -> bool {
        self.spec().generics.contains(&Generic::Element)
    }

    /// Returns the types of activations that the kernel has images for.
    pub fn elements(self) -> &'static [Element] {
        if self.is_typed() { &Element::ALL } else { &[Element::Bf16] }
    }
}
