//! The tables of what the compiler made of every image, and the rules that every image must keep.

use std::path::Path;
use std::process::Command;
use std::{env, fs, process};

use burst_attention_kernels::images::Images;
use burst_attention_kernels::instances::{Instance, Kernel, Target};
use burst_attention_kernels::variant::FeatureSet;

use crate::cubin::{Column, Cubin, Listing, QUALITY, Quality, Row, changes, regressions};
use crate::model::table::LOOPS;
use crate::model::{self, Modelled};
use crate::parallel::on_all_cores;

/// The tables that were last accepted.
const IMAGES: &str = include_str!("../../quality.tsv");
const MODELLED: &str = include_str!("../../loops.tsv");

/// Spilled instructions (loads and stores) that an image may have where the accumulators do not fit
/// the registers at any tile shape that was tried: tile width 256 and the images with all features,
/// on other targets than sm_90.
pub const SPILLS: u32 = 420;

/// Registers that a warp which loads keeps, where warps trade registers.
const LEFT: u32 = 32;

/// Bytes of stack of a thread that reads an image: the default of threads.
const STACK: usize = 2 << 20;

/// The report of an image.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The image.
    pub instance: Instance,
    /// Resources and counts of instructions.
    pub quality: Quality,
    /// The model's results for its main loops.
    pub loops: Vec<Modelled>,
}

/// Returns a report of each image of `targets`, in the order of their instances. The files of
/// images are in `folder`.
///
/// # Errors
/// If a file or CUDA's disassembler is missing, or an image or its listing is not understood.
pub fn qualities(folder: &Path, targets: &[Target]) -> Result<Vec<Report>, String> {
    let mut found = Vec::new();
    for &target in targets {
        let images = Images::read(folder, target).map_err(|error| error.to_string())?;
        let image = |instance| {
            let image = images.get(&instance).map_err(|error| error.to_string())?;
            Ok((instance, image))
        };
        let of_target: Result<Vec<_>, String> = Instance::of_target(target).map(image).collect();
        found.extend(reports(&of_target?)?);
    }
    Ok(found)
}

/// Returns a report of each image, in their order.
///
/// # Errors
/// If CUDA's disassembler is missing, or an image or its listing is not understood.
pub fn reports<I: AsRef<[u8]> + Sync>(images: &[(Instance, I)]) -> Result<Vec<Report>, String> {
    let home = env::var("CUDA_HOME").map_err(|_| {
        "expected CUDA_HOME to name the folder with bin/nvdisasm, which comes with the Python \
         package nvidia-cuda-nvdisasm; it is not set: run through make, or \
         eval \"$(.venv/bin/python kernels/toolchain.py)\""
    })?;
    let disassembler = Path::new(&home).join("bin/nvdisasm");
    let made = on_all_cores(images, STACK, |(instance, image)| {
        report(instance, image.as_ref(), &disassembler)
    });
    made.into_iter().collect()
}

fn report(instance: &Instance, image: &[u8], disassembler: &Path) -> Result<Report, String> {
    let name = instance.to_string();
    let fail = |what: &dyn std::fmt::Display| format!("{name}: {what}");
    let cubin = Cubin::parse(image).map_err(|error| fail(&error))?;
    let file = env::temp_dir().join(format!("{name}-{}.cubin", process::id()));
    fs::write(&file, image).map_err(|error| fail(&error))?;
    let output = Command::new(disassembler).args(["-c", "-hex"]).arg(&file).output();
    let _ = fs::remove_file(&file);
    let output = output.map_err(|error| fail(&format!("{}: {error}", disassembler.display())))?;
    if !output.status.success() {
        return Err(fail(&String::from_utf8_lossy(&output.stderr)));
    }
    let listing = Listing::parse(&String::from_utf8_lossy(&output.stdout));
    let listing = listing.map_err(|error| fail(&error))?;
    let quality = Quality::new(&name, &cubin, &listing).map_err(|error| fail(&error))?;
    let loops = match instance.target {
        // The model knows products of warpgroups, which few rows do not take.
        Target::Sm90 if instance.kernel != Kernel::Decode => {
            model::loops(instance.kernel, instance.tile(), instance.width, &listing)
        }
        _ => Ok(Vec::new()),
    };
    let loops = loops.map_err(|error| fail(&error))?;
    Ok(Report { instance: *instance, quality, loops })
}

/// The tables that are kept: one of images, one of the main loops that the model knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tables {
    images: Vec<Row>,
    loops: Vec<Row>,
}

impl Tables {
    /// Returns the tables of some reports.
    pub fn new(reports: &[Report]) -> Self {
        let image =
            |r: &Report| Row::new(&QUALITY, (&r.quality.name, &r.quality.target), &r.quality);
        let loops = reports.iter().flat_map(|r| {
            r.loops.iter().enumerate().map(|(i, found)| {
                let name = format!("{}:{i}", r.quality.name);
                Row::new(&LOOPS, (&name, &r.quality.target), found)
            })
        });
        Self { images: reports.iter().map(image).collect(), loops: loops.collect() }
    }

    /// Returns the rows of some images in the tables that were last accepted.
    ///
    /// # Errors
    /// If a header or a line does not have the form of [`Tables::texts`].
    pub fn accepted(instances: impl Iterator<Item = Instance>) -> Result<Self, String> {
        let names: Vec<String> = instances.map(|instance| instance.to_string()).collect();
        let wanted = |row: &Row| {
            let image = row.name.split(':').next().unwrap_or_default();
            names.iter().any(|name| name == image)
        };
        let mut accepted =
            Self { images: parse(&QUALITY, IMAGES)?, loops: parse(&LOOPS, MODELLED)? };
        accepted.images.retain(wanted);
        accepted.loops.retain(wanted);
        Ok(accepted)
    }

    /// Returns the names of the files in `kernels/`, and their texts.
    pub fn texts(&self) -> [(&'static str, String); 2] {
        let text = |header: String, rows: &[Row]| {
            let rows = rows.iter().map(Row::to_string);
            std::iter::once(header).chain(rows).map(|line| line + "\n").collect()
        };
        [
            ("quality.tsv", text(Row::header(&QUALITY), &self.images)),
            ("loops.tsv", text(Row::header(&LOOPS), &self.loops)),
        ]
    }

    /// Returns a message for everything that is worse now than in these tables.
    pub fn regressions(&self, now: &Self) -> Vec<String> {
        let mut all = regressions(&QUALITY, &self.images, &now.images);
        all.extend(regressions(&LOOPS, &self.loops, &now.loops));
        all
    }

    /// Returns a message for everything that differs from these tables and is not worse.
    pub fn changes(&self, now: &Self) -> Vec<String> {
        let mut all = changes(&QUALITY, &self.images, &now.images);
        all.extend(changes(&LOOPS, &self.loops, &now.loops));
        all
    }
}

fn parse<T>(columns: &[Column<T>], table: &str) -> Result<Vec<Row>, String> {
    let mut lines = table.lines();
    if lines.next() != Some(&Row::header(columns)) {
        return Err(format!("expected the table to begin with {:?}", Row::header(columns)));
    }
    let row = |line| Row::parse(columns, line).map_err(|error| format!("{line:?}: {error}"));
    lines.map(row).collect()
}

/// Returns the rules that an image breaks, whatever the accepted tables say.
pub fn faults(Report { instance, quality, .. }: &Report) -> Vec<String> {
    let mut faults = Vec::new();
    let mut expect = |holds: bool, what: String| {
        if !holds {
            faults.push(format!("{instance}: {what}"));
        }
    };
    let spills = quality.total.spill_loads + quality.total.spill_stores;
    let plain = !instance.variant.is_general();
    let allowed = match (instance.width, instance.target) {
        (_, Target::Sm90) => 0,
        (width, _) if plain && width < 256 => 0,
        _ => SPILLS,
    };
    expect(spills <= allowed, format!("expected at most {allowed} spills, found {spills}"));
    if let Some(awaited) = quality.awaited {
        // No warp leaves more registers than it has, so a block that waits for more hangs.
        let warps = quality.pool / quality.registers;
        let computing = instance.tile().warps as u32;
        let needed = awaited * computing + LEFT * warps.saturating_sub(computing);
        let pool = quality.pool;
        expect(needed <= pool, format!("its warps wait for {needed} registers, and have {pool}"));
    }
    if !instance.kernel.has_products() {
        return faults;
    }
    let matrix = quality.in_loops(|counts| counts.matrix);
    expect(matrix > 0, "expected matrix instructions in its loops, found none".into());
    if instance.target == Target::Sm90 {
        let loads = quality.in_loops(|counts| counts.tma_loads);
        expect(loads > 0, "expected TMA loads in its loops, found none".into());
        let loops = if plain && !instance.kernel.is_linear() { 2 } else { 1 };
        let main = quality.main_loops().count();
        expect(main >= loops, format!("expected {loops} main loops, found {main}"));
        let capped = instance.variant.has(FeatureSet::SOFT_CAP);
        if instance.kernel == Kernel::Forward && instance.width <= 128 && !capped {
            let orders: Vec<String> =
                quality.attention_loops().map(|l| l.order.to_string()).collect();
            let pipelined = quality
                .attention_loops()
                .any(|l| l.order.qk_before_pv() && l.order.exponentials_between_pv() > 0);
            expect(
                pipelined,
                format!(
                    "expected a loop that issues the next QKᵀ before PV and exponentials between \
                     PV's instructions, found {orders:?}"
                ),
            );
        }
    }
    faults
}
