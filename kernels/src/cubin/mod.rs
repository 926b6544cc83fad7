//! Reads cubins: what the compiler made of a kernel.
//!
//! No GPU and no driver is needed. [`Cubin`] reads the image itself: resources and parameters.
//! [`Listing`] reads the text that `nvdisasm -c` prints for it, [`Quality`] says what is in its
//! loops, and [`Row`] makes a line of a table of it that can be kept and compared against.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use burst_attention_kernels::cubin::{Cubin, Listing, QUALITY, Quality, Row};
//!
//! let cubin = Cubin::parse(&std::fs::read("forward.cubin")?)?;
//! let listing = Listing::parse(&std::fs::read_to_string("forward.sass")?)?;
//! let quality = Quality::new("forward", &cubin, &listing)?;
//! let row = Row::new(&QUALITY, ("forward", "sm_90a"), &quality);
//! println!("{}\n{row}", Row::header(&QUALITY));
//! # Ok(())
//! # }
//! ```

mod attributes;
mod baseline;
mod control;
mod elf;
mod flow;
mod image;
mod order;
mod quality;
mod sass;
#[cfg(test)]
mod synthetic;

pub use baseline::{Column, QUALITY, Row, Rule, changes, regressions};
pub use control::Control;
pub use image::{Architecture, Cubin, Kernel, Parameter};
pub use order::{Event, Order};
pub use quality::{Counts, LoopQuality, Quality};
pub use sass::{Instruction, Listing};

/// Why a cubin, its disassembly or a line of a baseline could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes end before something that they announce.
    #[error("expected {what} at bytes {start}..{end} of the cubin, but it has {len} bytes")]
    Truncated {
        /// What was to be read.
        what: &'static str,
        /// Where it was to start.
        start: u64,
        /// Where it was to end.
        end: u64,
        /// How many bytes there are.
        len: usize,
    },
    /// A field does not hold what a cubin of the supported kind has there.
    #[error("expected {what} to be {expected}, but it is {came}")]
    Field {
        /// Which field.
        what: &'static str,
        /// What it holds in a cubin.
        expected: &'static str,
        /// What it holds here.
        came: u64,
    },
    /// A name is not text, or not within its table of strings.
    #[error("expected a zero-terminated UTF-8 name at byte {0} of the cubin's table of strings")]
    Name(u64),
    /// Something that every kernel's cubin has is not there.
    #[error("the cubin has no {0}")]
    Missing(String),
    /// The cubin holds more or fewer than one kernel.
    #[error("expected one kernel in the cubin, but it has {0}")]
    Kernels(usize),
    /// A line of the disassembly has an unknown form.
    #[error("line {line} of the disassembly is not in the format of `nvdisasm -c`: {text:?}")]
    Line {
        /// Its number, from one.
        line: usize,
        /// What it says.
        text: String,
    },
    /// The disassembly holds no instruction.
    #[error("the disassembly holds no instruction")]
    NoInstruction,
    /// Addresses do not increase: the text is of more than one code section.
    #[error("expected one code section, but address {0:#x} is not above the one before it")]
    Address(u64),
    /// A branch goes to a label that is nowhere.
    #[error("the branch at {address:#x} goes to the label {label:?}, which is not in the listing")]
    Label {
        /// The branch's address.
        address: u64,
        /// The label it names.
        label: String,
    },
    /// A branch whose targets the listing does not tell.
    #[error("the targets of the branch at {address:#x} are not known: {text:?}")]
    Branch {
        /// Its address.
        address: u64,
        /// Opcode and operands.
        text: String,
    },
    /// Image and disassembly do not belong together.
    #[error("the cubin's kernel is {cubin:?}, the listing's functions are {listing:?}")]
    OtherKernel {
        /// Name in the cubin.
        cubin: String,
        /// Labels of functions in the listing.
        listing: Vec<String>,
    },
    /// A line of a baseline is not a row of the current table.
    #[error("expected a row with the columns {expected:?}, came {came:?}")]
    Row {
        /// The header.
        expected: String,
        /// The line.
        came: String,
    },
}
