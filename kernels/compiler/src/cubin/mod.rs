//! Reads cubins, the images that the compiler makes of kernels.
//!
//! This needs neither a GPU nor a driver. [`Cubin`] reads the image itself: resources and
//! parameters. [`Listing`] reads the text that `nvdisasm -c` prints for the image, [`Quality`]
//! counts what its loops hold, and a [`Row`] is the image's line in a table that later images are
//! compared against.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use burst_attention_compiler::cubin::{Cubin, Listing, QUALITY, Quality, Row};
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
pub use image::{Architecture, Cubin, KernelInfo};
pub use order::{Event, EventOrder};
pub use quality::{Counts, LoopQuality, Quality};
pub use sass::{Instruction, Listing};

/// The reason why a cubin, its disassembly or a line of a baseline could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes end before something that they announce.
    #[error("expected {what} at bytes {start}..{end} of the cubin, but it has {len} bytes")]
    Truncated {
        /// The part that was to be read.
        what: &'static str,
        /// The byte where the part was to start.
        start: u64,
        /// The byte where the part was to end.
        end: u64,
        /// The number of bytes.
        len: usize,
    },
    /// A field does not hold what a cubin of the supported kind has there.
    #[error("expected {what} to be {expected}, but it is {came}")]
    Field {
        /// The field.
        what: &'static str,
        /// The value in a cubin.
        expected: &'static str,
        /// The value that came.
        came: u64,
    },
    /// A name is not text, or not within its table of strings.
    #[error("expected a zero-terminated UTF-8 name at byte {0} of the cubin's table of strings")]
    Name(u64),
    /// A part that every kernel's cubin has is missing.
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
        /// The line.
        text: String,
    },
    /// The disassembly holds no instruction.
    #[error("the disassembly holds no instruction")]
    NoInstruction,
    /// Addresses do not increase: the text is of more than one code section.
    #[error("expected one code section, but address {0:#x} is not above the one before it")]
    Address(u64),
    /// A branch goes to a label that the listing lacks.
    #[error("the branch at {address:#x} goes to the label {label:?}, which is not in the listing")]
    Label {
        /// The branch's address.
        address: u64,
        /// The label it names.
        label: String,
    },
    /// The listing does not tell the targets of a branch.
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
