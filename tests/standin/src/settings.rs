//! The devices, as environment variables describe them.

use std::env;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

/// The most devices of a process.
pub const MOST_DEVICES: usize = 64;

/// A kind of device. The figures are those that NVIDIA's driver reports for it.
#[derive(Debug)]
pub struct Kind {
    /// The word for `STANDIN_KIND`.
    word: &'static str,
    /// The name of the device.
    pub name: &'static str,
    /// The compute capability: major, minor.
    pub capability: (i32, i32),
    pub multiprocessors: i32,
    pub memory: u64,
    /// Bytes of shared memory that a block may ask for.
    pub shared_memory: i32,
    pub l2_cache: i32,
    /// Kilohertz of the cores and of the memory.
    pub clock_rates: [i32; 2],
}

const GIB: u64 = 1 << 30;
const MIB: i32 = 1 << 20;

const KINDS: [Kind; 5] = [
    Kind {
        word: "a100",
        name: "NVIDIA A100-SXM4-80GB",
        capability: (8, 0),
        multiprocessors: 108,
        memory: 80 * GIB,
        shared_memory: 166_912,
        l2_cache: 40 * MIB,
        clock_rates: [1_410_000, 1_593_000],
    },
    Kind {
        word: "h100",
        name: "NVIDIA H100 80GB HBM3",
        capability: (9, 0),
        multiprocessors: 132,
        memory: 80 * GIB,
        shared_memory: 232_448,
        l2_cache: 50 * MIB,
        clock_rates: [1_980_000, 2_619_000],
    },
    Kind {
        word: "h200",
        name: "NVIDIA H200",
        capability: (9, 0),
        multiprocessors: 132,
        memory: 141 * GIB,
        shared_memory: 232_448,
        l2_cache: 60 * MIB,
        clock_rates: [1_980_000, 3_201_000],
    },
    Kind {
        word: "b200",
        name: "NVIDIA B200",
        capability: (10, 0),
        multiprocessors: 148,
        memory: 180 * GIB,
        shared_memory: 232_448,
        l2_cache: 126 * MIB,
        clock_rates: [1_965_000, 3_996_000],
    },
    Kind {
        word: "gb300",
        name: "NVIDIA GB300",
        capability: (10, 3),
        multiprocessors: 152,
        memory: 288 * GIB,
        shared_memory: 232_448,
        l2_cache: 126 * MIB,
        clock_rates: [2_032_000, 3_996_000],
    },
];

/// All settings.
#[derive(Debug)]
pub struct Settings {
    /// `STANDIN_DEVICES`: the number of devices of this process; 8 if it is not set.
    pub devices: usize,
    /// `STANDIN_KIND`: the kind of all devices; `h100` if it is not set.
    pub kind: &'static Kind,
    /// `STANDIN_CUDNN`: the version of cuDNN, as cuDNN itself counts; 92801, which is 9.28.1, if it
    /// is not set.
    pub cudnn: u64,
    /// `STANDIN_JITTER_US`: the longest random delay before an operation of a stream.
    pub jitter: Duration,
    /// `STANDIN_MAIL`: a folder through which processes exchange messages. Without it NCCL knows
    /// only the ranks of this process.
    pub mail: Option<PathBuf>,
    /// `STANDIN_LOG`: a file that gets a line for each call.
    pub log: Option<PathBuf>,
    /// `STANDIN_IMAGES`: the folder of the project's images.
    pub images: Option<PathBuf>,
    /// `STANDIN_TILE_IR`: a folder that keeps the kernels' Tile IR between processes.
    pub tile_ir: Option<PathBuf>,
    /// `NCCL_LAUNCH_ORDER_IMPLICIT`, which XLA sets: the operations of a device run in the order in
    /// which the host issues them.
    pub ordered: bool,
}

/// Returns the settings.
///
/// # Panics
/// If a variable has no meaning.
pub fn settings() -> &'static Settings {
    static SETTINGS: LazyLock<Settings> = LazyLock::new(|| {
        let devices = number("STANDIN_DEVICES", 8) as usize;
        assert!(devices <= MOST_DEVICES, "STANDIN_DEVICES: at most {MOST_DEVICES}, got {devices}");
        let word = env::var("STANDIN_KIND").unwrap_or_else(|_| "h100".into());
        let words = KINDS.each_ref().map(|kind| kind.word);
        let kind = KINDS.iter().find(|kind| kind.word == word);
        let path = |name| env::var_os(name).map(PathBuf::from);
        Settings {
            devices,
            kind: kind.unwrap_or_else(|| panic!("STANDIN_KIND: one of {words:?}, got {word}")),
            cudnn: number("STANDIN_CUDNN", 92_801),
            jitter: Duration::from_micros(number("STANDIN_JITTER_US", 0)),
            mail: path("STANDIN_MAIL"),
            log: path("STANDIN_LOG"),
            images: path("STANDIN_IMAGES"),
            tile_ir: path("STANDIN_TILE_IR"),
            ordered: env::var("NCCL_LAUNCH_ORDER_IMPLICIT").is_ok_and(|value| value == "1"),
        }
    });
    &SETTINGS
}

fn number(name: &str, default: u64) -> u64 {
    let Ok(text) = env::var(name) else { return default };
    text.parse().unwrap_or_else(|_| panic!("{name}: a whole number, got {text}"))
}
