//! The table of what the compiler made of every image, and the rules it must keep.

use std::path::Path;
use std::process::Command;
use std::{env, fs, process};

use burst_attention_kernels::cubin::{Cubin, Listing, Quality, Row};
use burst_attention_kernels::images::Images;
use burst_attention_kernels::instances::{Instance, Kernel, Target};

use crate::parallel::on_all_cores;

/// The table as it was last accepted.
pub const BASELINE: &str = include_str!("../../quality.tsv");

/// Spilled instructions (loads and stores) allowed where the accumulators do not fit the registers
/// at any tile shape that was tried: on other targets than sm_90 tile width 256 and the general
/// variants.
pub const SPILLS: u32 = 420;

/// Stack of a thread that reads an image: what threads have by default.
const STACK: usize = 2 << 20;

/// What the compiler made of each image of `targets`, in the order of their instances; the files of
/// images are in `folder`.
///
/// # Errors
/// If a file or CUDA's disassembler is missing, or an image or its listing not understood.
pub fn qualities(folder: &Path, targets: &[Target]) -> Result<Vec<(Instance, Quality)>, String> {
    let home = env::var("CUDA_HOME").map_err(|_| {
        "expected CUDA_HOME to name the folder with bin/nvdisasm, which comes with the Python \
         package nvidia-cuda-nvdisasm; it is not set: run through make, or \
         eval \"$(.venv/bin/python kernels/toolchain.py)\""
    })?;
    let disassembler = Path::new(&home).join("bin/nvdisasm");
    let mut all = Vec::new();
    for &target in targets {
        let images = Images::read(folder, target).map_err(|error| error.to_string())?;
        let instances: Vec<Instance> = Instance::of_target(target).collect();
        let made = on_all_cores(&instances, STACK, |instance| {
            let image = images.get(instance).map_err(|error| error.to_string())?;
            Ok((*instance, quality(instance, image, &disassembler)?))
        });
        all.extend(made.into_iter().collect::<Result<Vec<_>, String>>()?);
    }
    Ok(all)
}

fn quality(instance: &Instance, image: &[u8], disassembler: &Path) -> Result<Quality, String> {
    let name = instance.to_string();
    let fail = |what: &dyn std::fmt::Display| format!("{name}: {what}");
    let cubin = Cubin::parse(image).map_err(|error| fail(&error))?;
    let file = env::temp_dir().join(format!("{name}-{}.cubin", process::id()));
    fs::write(&file, image).map_err(|error| fail(&error))?;
    let output = Command::new(disassembler).arg("-c").arg(&file).output();
    let _ = fs::remove_file(&file);
    let output = output.map_err(|error| fail(&format!("{}: {error}", disassembler.display())))?;
    if !output.status.success() {
        return Err(fail(&String::from_utf8_lossy(&output.stderr)));
    }
    let listing = Listing::parse(&String::from_utf8_lossy(&output.stdout));
    let listing = listing.map_err(|error| fail(&error))?;
    Quality::new(&name, &cubin, &listing).map_err(|error| fail(&error))
}

/// The table's text.
pub fn table(qualities: &[(Instance, Quality)]) -> String {
    let rows = qualities.iter().map(|(_, quality)| quality.to_row().to_string());
    let lines: Vec<String> = std::iter::once(Row::header()).chain(rows).collect();
    lines.join("\n") + "\n"
}

/// The rows of a table's text.
///
/// # Errors
/// If its header or a line is not as [`table`] writes it.
pub fn parse(table: &str) -> Result<Vec<Row>, String> {
    let mut lines = table.lines();
    if lines.next() != Some(&Row::header()) {
        return Err(format!("expected the table to begin with {:?}", Row::header()));
    }
    lines.map(|line| line.parse().map_err(|error| format!("{line:?}: {error}"))).collect()
}

/// The rows of the baseline for some targets.
///
/// # Errors
/// As [`parse`].
pub fn baseline(targets: &[Target]) -> Result<Vec<Row>, String> {
    let names: Vec<String> = targets
        .iter()
        .flat_map(|&target| Instance::of_target(target))
        .map(|instance| instance.to_string())
        .collect();
    let mut rows = parse(BASELINE)?;
    rows.retain(|row| names.contains(&row.name));
    Ok(rows)
}

/// What is wrong with an image, whatever the baseline says.
pub fn faults(instance: &Instance, quality: &Quality) -> Vec<String> {
    let mut faults = Vec::new();
    let mut expect = |holds: bool, what: String| {
        if !holds {
            faults.push(format!("{instance}: {what}"));
        }
    };
    let spills = quality.total.spill_loads + quality.total.spill_stores;
    let plain = instance.kernel == instance.kernel.plain();
    let allowed = match (instance.width, instance.target) {
        (_, Target::Sm90) => 0,
        (width, _) if plain && width < 256 => 0,
        _ => SPILLS,
    };
    expect(spills <= allowed, format!("expected at most {allowed} spills, found {spills}"));
    if !instance.kernel.is_attention() {
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
        if instance.kernel == Kernel::Forward && instance.width <= 128 {
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
