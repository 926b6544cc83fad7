//! Meanings of arguments.

/// An array of a kernel, by its role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operand {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Result of the forward pass.
    O,
    /// Log-sum-exp, natural.
    Lse,
    /// Log-sum-exp, natural, head by head without gaps.
    PackedLse,
    /// Running Σ p·v.
    Acc,
    /// Running maximum of the scaled scores.
    RowMax,
    /// Running Σ p.
    RowSum,
    /// Σ p·v of the state that arrived.
    ArrivedAcc,
    /// Maximum of the state that arrived.
    ArrivedMax,
    /// Σ p of the state that arrived.
    ArrivedSum,
    /// Gradient of the result.
    Dout,
    /// Gradient of the log-sum-exp.
    Dlse,
    /// Log-sum-exp in base 2.
    LseLog2,
    /// rowsum(dout ∘ o) − dlse.
    Delta,
    /// An array to be set to 0.
    Zeros,
    /// Running gradient of keys.
    DkAcc,
    /// Running gradient of values.
    DvAcc,
    /// Running gradient of queries.
    DqAcc,
    /// Gradient of keys.
    Dk,
    /// Gradient of values.
    Dv,
    /// Gradient of queries.
    Dq,
    /// Segment of each query row.
    QSegments,
    /// Segment of each key row.
    KvSegments,
    /// Rows that the segments of each 64 resident rows let them see.
    Ranges,
    /// Interval of query positions that see each row.
    Visible,
    /// Second interval of each row.
    AlsoVisible,
    /// Position of each row.
    Positions,
    /// Position of each row that slopes and dropout count by.
    CountedPositions,
    /// Packed numbers of rows.
    MaskRows,
    /// Packed numbers of rows that these rows may see.
    OtherMaskRows,
    /// Runs of rows that each 128 resident rows may see.
    Runs,
    /// Slope of each query head.
    Slopes,
    /// Numbers that dropout draws from.
    Dropout,
    /// Part of each query in the gradient of its head's slope.
    Dslopes,
    /// Segment of each row of one side.
    Segments,
    /// Segment of each row that these rows may see.
    Others,
    /// First term of a sum.
    A,
    /// Second term of a sum.
    B,
    /// Sum, rounded.
    Out,
    /// An accumulator that stays.
    Home,
    /// An accumulator that arrived.
    Arrived,
    /// Sums of log decays.
    Sums,
    /// Products of queries with keys under decays of channels.
    Pairs,
    /// Queries and keys with their decays to the middle of pairs of blocks.
    Met,
    /// Keys with their decays to the middle of pairs of blocks.
    KeysMet,
    /// Decays to the middle of pairs of blocks.
    Fades,
    /// Keys with their decays to the end of their tile.
    KeysToEnd,
    /// States of linear attention.
    State,
    /// States that parts of the tokens begin with; gradients of the states behind them.
    Before,
    /// What parts of the tokens do to any state.
    Transfer,
    /// Turned gradients of the states behind parts.
    Turned,
    /// Rates of the delta rule.
    Beta,
    /// Inverses of the delta rule.
    Inverse,
    /// Corrected values of the delta rule.
    Corrected,
    /// Gradient of the products with inverses.
    Dy,
    /// Factor of the products by row.
    Other,
    /// Products by row.
    Dots,
    /// Products by row of the gradient of keys with keys.
    KeyDots,
    /// Ids of the pages of each source.
    PageTable,
    /// Slices, tiles and source of each unit.
    Units,
    /// Keys that each row of a unit sees.
    Intervals,
    /// Rank of the device among the devices that share the keys.
    Rank,
    /// Weights of each row and key.
    Weights,
    /// Level of each row's weights in each tile of keys.
    TileMax,
    /// Sums of each row's weights in each tile of keys.
    TileSum,
    /// Σ p·v of each piece.
    PieceAcc,
    /// Largest score of each piece.
    PieceMax,
    /// Σ p of each piece.
    PieceSum,
}

/// The size of a dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// Batch entries.
    Batch,
    /// Query rows; the rows of a kernel without keys; tokens of linear attention.
    QLen,
    /// Key rows.
    KvLen,
    /// Rows up to the end of a tile.
    PaddedRows,
    /// Parts of the tokens.
    Parts,
    /// Query heads; heads of states and decays.
    Heads,
    /// Key/value heads.
    KvHeads,
    /// Heads of linear attention's queries.
    QHeads,
    /// Heads times tiles of columns.
    DotHeads,
    /// Columns of queries and keys.
    HeadDim,
    /// Columns of values and results.
    ValueDim,
    /// Units of decode.
    Units,
    /// Sources of units.
    Sources,
    /// Pages of a source.
    SourcePages,
    /// Pages of all sources.
    Pages,
    /// Rows of a page.
    PageRows,
    /// Keys of a source, with each page up to the end of its last tile.
    Capacity,
    /// Tiles of a source.
    Tiles,
    /// Slots of pieces.
    Slots,
    /// Rows of a tile of queries.
    TileRows,
    /// ⌈resident rows / 64⌉; no argument has this value.
    RangeBlocks,
    /// ⌈resident rows / 128⌉; no argument has this value.
    RunBlocks,
    /// 1; like the sizes below, no argument has this value.
    One,
    /// 2.
    Two,
    /// 4.
    Four,
    /// 6.
    Six,
    /// 10.
    Ten,
    /// 64.
    SixtyFour,
}

impl Size {
    /// Returns a size that is the same everywhere.
    pub fn fixed(self) -> Option<usize> {
        match self {
            Size::One => Some(1),
            Size::Two => Some(2),
            Size::Four => Some(4),
            Size::Six => Some(6),
            Size::Ten => Some(10),
            Size::SixtyFour => Some(64),
            _ => None,
        }
    }
}

/// The meaning of an argument's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// Address of an array.
    Address(Operand),
    /// Elements between batch entries of an array and of the arrays laid out like it.
    BatchStride(Operand),
    /// Elements between heads of an array and of the arrays laid out like it.
    HeadStride(Operand),
    /// Whether the launch uses an array: 1 or 0.
    Has(Operand),
    /// A size.
    Size(Size),
    /// Elements of a state of linear attention.
    StateSize,
    /// Elements of a part's transfer.
    TransferSize,
    /// `softmax_scale` · log2 e.
    ScaleLog2,
    /// Factor on q·k.
    SoftmaxScale,
    /// Factor on a sum.
    Scale,
    /// Whether blocks keep keys: 1 or 0.
    KeysStay,
    /// Smallest key row − query row that is seen.
    Lower,
    /// Largest key row − query row that is seen.
    Upper,
    /// Heads of resident rows that blocks work on together.
    Section,
    /// Whether the last rows come first: 1 or 0.
    Reverse,
    /// Whether a token's own key and value give it nothing: 1 or 0.
    Strict,
    /// Whether the state or accumulator starts empty: 1 or 0.
    First,
    /// Whether the launch writes results instead of the state or accumulator: 1 or 0.
    Last,
    /// Soft cap · log2 e.
    CapLog2,
    /// 2 · `softmax_scale` · log2 e / soft cap.
    TwiceByCap,
    /// 2³² times the rate of dropout.
    Threshold,
    /// 1 / (1 − rate of dropout).
    KeepScale,
    /// Position of the first query.
    QPosition,
    /// Position of the first key.
    KPosition,
    /// Positions from one row to the next.
    PositionStride,
    /// Tiles of a part of linear attention.
    PartTiles,
    /// Whether narrowed values are kept below 2^15: 1 or 0.
    Bounded,
    /// Binary logarithm of the tiles of a page; 31 where a source is one page.
    PageShift,
    /// Tiles of a slice.
    SliceTiles,
    /// Equal runs of the line of slices.
    Runs,
    /// The most slices of a pair, where each slice is a piece; otherwise 0.
    MostSlices,
    /// Consecutive positions that a device holds.
    Interleave,
    /// Devices that share the keys.
    WorldSize,
}
