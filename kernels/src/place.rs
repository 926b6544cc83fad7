//! The places of a launch's arrays in memory.

use serde::Deserialize;

/// The place of an array `[batch, rows, heads, columns]` or `[batch, rows, heads]`. Each batch
/// entry is contiguous from the first row that the launch uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rows {
    /// Address of the first element of the first row used; 0 means that the array is not given.
    pub address: u64,
    /// Elements between batch entries; any number where there is one entry.
    pub batch_stride: u64,
}

/// The place of float32 statistics `[batch, heads, rows]`. Each head is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statistics {
    /// Address of the first row used of the first head; 0 means that the array is not given.
    pub address: u64,
    /// Elements between batch entries; any number where there is one entry. A multiple of 4 keeps
    /// each entry aligned where one launch cannot take all entries.
    pub batch_stride: u64,
    /// Elements between heads; any number where there is one head.
    pub head_stride: u64,
}
