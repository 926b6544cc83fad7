//! Launch records of decode.

use super::{Access, Argument, Kind, Meaning, Operand, Size, View, count, joined};

const QUERIES: &[Argument] = &arguments! {
    q: Activations(Q)[Units, KvHeads, QLen, HeadDim] / 16, "queries [units, kv_heads, rows, head_dim]";
};

const KEYS: &[Argument] = &arguments! {
    k: Activations(K)[Pages, PageRows, KvHeads, HeadDim] / 16, "keys [pages, page_rows, kv_heads, head_dim]";
};

const VALUES: &[Argument] = &arguments! {
    v: Activations(V)[Pages, PageRows, KvHeads, ValueDim] / 16, "values [pages, page_rows, kv_heads, value_dim]";
};

const PAGE_TABLE: &[Argument] = &arguments! {
    page_table: Int32s(PageTable)[Sources, SourcePages] / 4, "ids of the pages of each source [sources, source_pages]; rows of a page out of range are hidden";
};

const UNITS: &[Argument] = &arguments! {
    units: Int32s(Units)[Units, Four] / 4, "of each unit [units, 4]: slices of a pair of this and all earlier units, first tile, end of the tiles, source";
    intervals: Int32s(Intervals)[Units, Two, QLen] / 4, "keys that each row sees [units, 2, rows]: first row of the source, and end";
};

const SLOPES: &[Argument] = &arguments! {
    places: Int32s(CountedPositions)[Units, QLen] In(Slopes) / 4, "position of each row that slopes count by [units, rows]; read if has_slopes";
    slopes: Float32s(Slopes)[Units, KvHeads, QLen] In(Slopes) / 4, "ALiBi's slope of each row [units, kv_heads, rows]; read if has_slopes";
};

const RANK: &[Argument] = &arguments! {
    rank: Int32s(Rank)[One] / 4, "this device's rank among the devices that share the keys";
};

const WEIGHTS: &[Argument] = &arguments! {
    weights: Activations(Weights)[Units, KvHeads, QLen, Capacity] Out / 16, "weights of each row and key, relative to the level of the row in the key's tile [units, kv_heads, rows, capacity]; tiles that no row sees are not written";
    tile_max: Float32s(TileMax)[Units, KvHeads, Tiles, PaddedRows] Out / 16, "level of each row in each tile, its largest score in base 2 [units, kv_heads, tiles, padded_rows]";
    tile_sum: Float32s(TileSum)[Units, KvHeads, Tiles, PaddedRows] Out / 16, "sums of the weights of each row in each tile [units, kv_heads, tiles, padded_rows]";
};

const WEIGHTS_READ: &[Argument] = &arguments! {
    weights: Activations(Weights)[Units, KvHeads, QLen, Capacity] / 16, "weights of each row and key, relative to the level of the row in the key's tile [units, kv_heads, rows, capacity]";
    tile_max: Float32s(TileMax)[Units, KvHeads, Tiles, PaddedRows] / 16, "level of each row in each tile, its largest score in base 2 [units, kv_heads, tiles, padded_rows]";
    tile_sum: Float32s(TileSum)[Units, KvHeads, Tiles, PaddedRows] / 16, "sums of the weights of each row in each tile [units, kv_heads, tiles, padded_rows]";
};

const PIECES: &[Argument] = &arguments! {
    piece_acc: Float32s(PieceAcc)[Slots, TileRows, ValueDim] Out / 16, "Σ p·v of the piece in each slot [slots, tile_rows, value_dim]; empty slots are not written";
    piece_max: Float32s(PieceMax)[Slots, TileRows] Out / 16, "largest score in base 2 [slots, tile_rows]";
    piece_sum: Float32s(PieceSum)[Slots, TileRows] Out / 16, "Σ p [slots, tile_rows]";
};

const PIECES_READ: &[Argument] = &arguments! {
    piece_acc: Float32s(PieceAcc)[Slots, TileRows, ValueDim] / 16, "Σ p·v of the piece in each slot [slots, tile_rows, value_dim]; empty slots are not read";
    piece_max: Float32s(PieceMax)[Slots, TileRows] / 16, "largest score in base 2 [slots, tile_rows]";
    piece_sum: Float32s(PieceSum)[Slots, TileRows] / 16, "Σ p [slots, tile_rows]";
};

const RESULTS: &[Argument] = &arguments! {
    o: Float32s(O)[Units, KvHeads, QLen, ValueDim] Out / 16, "result [units, kv_heads, rows, value_dim]";
    lse: Float32s(Lse)[Units, KvHeads, QLen] Out / 16, "log-sum-exp [units, kv_heads, rows], natural";
};

const UNIT_SIZES: &[Argument] = &arguments! {
    unit_count: I32(Size(Units)), "units";
    rows: I32(Size(QLen)), "rows of a unit";
    kv_heads: I32(Size(KvHeads)), "key/value heads";
};

const HEAD_DIM: &[Argument] = &arguments! {
    head_dim: I32(Size(HeadDim)) / 8, "columns of queries and keys";
};

const VALUE_DIM: &[Argument] = &arguments! {
    value_dim: I32(Size(ValueDim)) / 8, "columns of values and results";
};

const PAGE_SIZES: &[Argument] = &arguments! {
    pages: I32(Size(Pages)), "pages of all sources";
    page_rows: I32(Size(PageRows)), "rows of a page";
    sources: I32(Size(Sources)), "sources";
    source_pages: I32(Size(SourcePages)), "pages of a source";
    page_shift: I32(PageShift), "binary logarithm of the tiles of a page; 31 where a source is one page";
};

const WEIGHT_SIZES: &[Argument] = &arguments! {
    capacity: I32(Size(Capacity)) / 16, "keys of a source, with each page up to the end of its last tile";
    tiles: I32(Size(Tiles)), "tiles of a source";
    padded_rows: I32(Size(PaddedRows)) / 16, "rows of a unit, rounded up to whole tiles";
};

const SLOTS: &[Argument] = &arguments! {
    slots: I32(Size(Slots)), "slots of pieces";
    tile_rows: I32(Size(TileRows)), "rows of a piece";
};

const SLICES: &[Argument] = &arguments! {
    slice_tiles: I32(SliceTiles), "tiles of a slice";
};

const CUTS: &[Argument] = &arguments! {
    run_count: I32(Runs), "equal runs of the line of slices";
    most_slices: I32(MostSlices), "0: pieces are the parts of runs; otherwise each slice is a piece, and a pair has this many at most";
};

const NUMBERS: &[Argument] = &arguments! {
    scale_log2: F32(ScaleLog2), "softmax_scale · log2 e";
    cap_log2: F32(CapLog2), "soft cap of the scaled scores, times log2 e; 0 for none";
    twice_by_cap: F32(TwiceByCap), "2 · softmax_scale · log2 e / soft cap; 0 for none";
    has_slopes: I32(Has(Slopes)), "1: slope · (key position − query position) is added to scores";
    interleave: I32(Interleave), "consecutive positions that a device holds; read with slopes, like the next argument";
    world_size: I32(WorldSize), "devices that share the keys";
};

/// Arguments of `decode`.
pub const DECODE: &[Argument] = record!(
    QUERIES, KEYS, VALUES, PAGE_TABLE, UNITS, SLOPES, RANK, PIECES, UNIT_SIZES, HEAD_DIM,
    VALUE_DIM, PAGE_SIZES, SLOTS, SLICES, CUTS, NUMBERS
);

/// Arguments of `decode_latents`.
pub const DECODE_LATENTS: &[Argument] = record!(
    QUERIES, KEYS, PAGE_TABLE, UNITS, SLOPES, RANK, PIECES, UNIT_SIZES, HEAD_DIM, VALUE_DIM,
    PAGE_SIZES, SLOTS, SLICES, CUTS, NUMBERS
);

/// Arguments of `latent_weights`.
pub const LATENT_WEIGHTS: &[Argument] = record!(
    QUERIES,
    KEYS,
    PAGE_TABLE,
    UNITS,
    SLOPES,
    RANK,
    WEIGHTS,
    UNIT_SIZES,
    HEAD_DIM,
    PAGE_SIZES,
    WEIGHT_SIZES,
    SLICES,
    CUTS,
    NUMBERS
);

/// Arguments of `latent_values`.
pub const LATENT_VALUES: &[Argument] = record!(
    KEYS,
    PAGE_TABLE,
    UNITS,
    RANK,
    WEIGHTS_READ,
    PIECES,
    UNIT_SIZES,
    HEAD_DIM,
    VALUE_DIM,
    PAGE_SIZES,
    WEIGHT_SIZES,
    SLOTS,
    SLICES,
    CUTS
);

/// Arguments of `decode_merge`.
pub const DECODE_MERGE: &[Argument] =
    record!(UNITS, PIECES_READ, RESULTS, UNIT_SIZES, VALUE_DIM, SLOTS, CUTS);
