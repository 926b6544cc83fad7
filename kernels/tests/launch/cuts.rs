//! The rows and pairs that the launches of a description cover.

use burst_attention_kernels::instances::{Element, Kernel, Target};
use burst_attention_kernels::launch::{Launch, MAX_VIEW_BYTES, Rectangle};
use burst_attention_kernels::record::{Kind, layout};

use crate::random::{Random, rectangle};
use crate::trial::{CHOICES, Covered, KERNELS, PASSES, Trial, integer};

/// Returns a limit that some tiles of rows fit, but often not all tiles.
fn small_limit(random: &mut Random, shape: &Rectangle) -> u64 {
    let row = shape.heads * shape.head_dim.max(shape.value_dim) * 4;
    let statistics = (shape.heads * (shape.q_len + 8) + 128) * 4;
    let tile = (row * 128).max(statistics) + 64;
    (tile * (1 + random.below(4)) + random.below(tile)) as u64
}

pub fn each_small_trial(mut check: impl FnMut(&Trial, &[Launch])) {
    let mut random = Random(7);
    let mut cut = 0;
    for seed in 0..400 {
        let shape = rectangle(&mut random, 800);
        let limit = small_limit(&mut random, &shape);
        let (kernel, wanted) = (random.of(&KERNELS), random.of(&CHOICES));
        let mut trial = Trial::new(kernel, shape, limit, seed).with(wanted);
        let launches = trial.launches(random.of(&Target::ALL)).unwrap();
        cut += usize::from(trial.main(&launches).count() > 3);
        check(&trial, &launches);
    }
    assert!(cut > 100, "only {cut} trials were cut into more than 3 launches");
}

pub fn each_huge_trial(mut check: impl FnMut(&Trial, &[Launch])) {
    let mut random = Random(11);
    for kernel in KERNELS {
        for (lower, upper) in [(i64::MIN, i64::MAX), (i64::MIN, 0), (-4096, 0), (1 << 40, i64::MAX)]
        {
            for target in Target::ALL {
                let kv_heads = random.of(&[8, 64]);
                let shape = Rectangle {
                    batch: 3,
                    q_len: 300_000 + random.below(500),
                    kv_len: 300_000 + random.below(500),
                    heads: 64,
                    kv_heads,
                    head_dim: 128,
                    value_dim: 96,
                    element: Element::Bf16,
                    lower,
                    upper,
                    softmax_scale: 0.1,
                };
                let mut trial = Trial::new(kernel, shape, MAX_VIEW_BYTES, random.next())
                    .with(random.of(&CHOICES));
                let launches = trial.launches(target).unwrap();
                check(&trial, &launches);
            }
        }
    }
}

fn parts(trial: &Trial, launches: &[Launch]) -> Vec<Covered> {
    trial.main(launches).map(|launch| trial.covered(launch)).collect()
}

/// Asserts that the launches that work on one resident row have, in order, the flags of one chain.
fn assert_chained(trial: &Trial, parts: &[Covered], b: usize, row: usize) {
    let resident = |part: &Covered| match trial.resident_is_keys() {
        true => part.keys.contains(&row),
        false => part.queries.contains(&row),
    };
    let chain: Vec<_> =
        parts.iter().filter(|part| part.batch.contains(&b) && resident(part)).collect();
    let flags: Vec<_> = chain.iter().map(|part| (part.first, part.last)).collect();
    if flags.is_empty() {
        assert!(!trial.first && !trial.last, "entry {b}, row {row} is neither started nor written");
        return;
    }
    let end = flags.len() - 1;
    let expected = |n| (trial.first && n == 0, trial.last && n == end);
    assert_eq!(flags, (0..=end).map(expected).collect::<Vec<_>>(), "entry {b}, row {row}");
}

fn assert_seen_once(trial: &Trial, parts: &[Covered], b: usize, i: usize, j: usize) {
    let Rectangle { lower, upper, .. } = trial.rectangle;
    let expected = usize::from((lower..=upper).contains(&(j as i64 - i as i64)));
    let times = parts.iter().filter(|part| part.sees(b, i, j)).count();
    assert_eq!(times, expected, "entry {b}, query {i}, key {j}");
}

fn streams(trial: &Trial) -> bool {
    PASSES.contains(&trial.kernel)
}

#[test]
fn each_resident_row_is_started_and_written_once() {
    each_small_trial(|trial, launches| {
        let parts = parts(trial, launches);
        for b in 0..trial.rectangle.batch {
            (0..trial.resident_rows()).for_each(|row| assert_chained(trial, &parts, b, row));
        }
    });
    each_huge_trial(|trial, launches| {
        let parts = parts(trial, launches);
        for b in 0..trial.rectangle.batch {
            let rows = (0..trial.resident_rows()).step_by(61).chain([trial.resident_rows() - 1]);
            rows.for_each(|row| assert_chained(trial, &parts, b, row));
        }
    });
}

#[test]
fn each_pair_of_the_band_is_seen_once() {
    each_small_trial(|trial, launches| {
        let parts = parts(trial, launches);
        let Rectangle { batch, q_len, kv_len, .. } = trial.rectangle;
        for b in (0..batch).filter(|_| streams(trial)) {
            // Every query row, and keys at a step that meets each remainder within a tile.
            for i in 0..q_len {
                (i % 7..kv_len).step_by(7).for_each(|j| assert_seen_once(trial, &parts, b, i, j));
            }
        }
    });
    let mut random = Random(3);
    each_huge_trial(|trial, launches| {
        let parts = parts(trial, launches);
        let Rectangle { batch, q_len, kv_len, .. } = trial.rectangle;
        for _ in (0..3000).filter(|_| streams(trial)) {
            let (b, i) = (random.below(batch), random.below(q_len));
            let near = (i + random.below(5000)).saturating_sub(4500).min(kv_len - 1);
            let j = if random.flip() { near } else { random.below(kv_len) };
            assert_seen_once(trial, &parts, b, i, j);
        }
    });
}

#[test]
fn cuts_that_see_each_other_at_a_single_pair_are_launched() {
    let mut cut = 0;
    for kernel in PASSES {
        for diagonal in -400..400 {
            let shape = Rectangle {
                batch: 1,
                q_len: 400,
                kv_len: 400,
                heads: 1,
                kv_heads: 1,
                head_dim: 64,
                value_dim: 64,
                element: Element::F16,
                lower: diagonal,
                upper: diagonal,
                softmax_scale: 1.0,
            };
            // The limit holds 128 rows of float32.
            let mut trial = Trial::new(kernel, shape, 128 * 64 * 4 + 4, 1);
            let launches = trial.launches(Target::Sm90).unwrap();
            let parts = parts(&trial, &launches);
            cut += usize::from(parts.len() > 3);
            for i in (0..400).filter(|i| (0..400).contains(&(i + diagonal))) {
                assert_seen_once(&trial, &parts, 0, i as usize, (i + diagonal) as usize);
            }
        }
    }
    assert!(cut > 1000, "only {cut} were cut");
}

/// Returns the bytes of the view that a kernel makes of its argument `name`, from the launch alone.
pub fn span(launch: &Launch, name: &str, kind: Kind) -> u64 {
    let get = |name: &str| if name.is_empty() { 1 } else { integer(launch, name) as u64 };
    let kernel = launch.instance().kernel;
    let rows = if launch.value("rows").is_some() { "rows" } else { "q_len" };
    let own_stride = format!("{name}_batch_stride");
    let stride = match name {
        "dout" if kernel == Kernel::Delta => "o_batch_stride",
        "dlse" => "lse_batch_stride",
        "row_max" | "row_sum" | "lse_log2" | "delta" => "stat_batch_stride",
        "arrived_max" | "arrived_sum" => "arrived_stat_batch_stride",
        _ => &own_stride,
    };
    let of_values = if launch.value("value_dim").is_some() { "value_dim" } else { "head_dim" };
    let (rows, columns) = match name {
        "q" | "dq" | "dq_acc" | "zeros" => (rows, ["heads", "head_dim"]),
        "home" | "out" if kernel == Kernel::AddGradient => (rows, ["kv_heads", "head_dim"]),
        "a" | "b" | "out" | "home" | "arrived" => (rows, ["heads", "head_dim"]),
        "o" | "dout" | "acc" | "arrived_acc" | "arrived_o" => (rows, ["heads", of_values]),
        "k" | "dk" | "dk_acc" => ("kv_len", ["kv_heads", "head_dim"]),
        "v" | "dv" | "dv_acc" => ("kv_len", ["kv_heads", of_values]),
        "lse" | "dlse" | "dslopes" => (rows, ["heads", ""]),
        "row_max" | "row_sum" | "lse_log2" | "delta" | "arrived_max" | "arrived_sum"
        | "arrived_lse" | "packed_lse" => (rows, [""; 2]),
        "slopes" => ("", ["heads", ""]),
        "dropout" => ("", [""; 2]),
        "ranges" if kernel == Kernel::KeyGrads => ("kv_len", [""; 2]),
        "q_segments" | "segments" | "ranges" => ("q_len", [""; 2]),
        "kv_segments" | "others" => ("kv_len", [""; 2]),
        name => panic!("{name}"),
    };
    assert!(get(stride) > 0, "{stride}");
    let before = (get("batch") - 1) * get(stride);
    let factors = columns.into_iter().map(get);
    let entry = match stride {
        "stat_batch_stride" => (get("heads") - 1) * get("stat_head_stride") + get(rows),
        "arrived_stat_batch_stride" => {
            (get("heads") - 1) * get("arrived_stat_head_stride") + get(rows)
        }
        "arrived_lse_batch_stride" => {
            (get("heads") - 1) * get("arrived_lse_head_stride") + get(rows)
        }
        "packed_lse_batch_stride" => (get("heads") - 1) * get("packed_lse_head_stride") + get(rows),
        "dropout_batch_stride" => 4,
        "ranges_batch_stride" => 4 * get(rows).div_ceil(64),
        _ => get(rows) * factors.product::<u64>(),
    };
    (before + entry) * if kind == Kind::Activations { 2 } else { 4 }
}

fn assert_in_reach(trial: &Trial, launches: &[Launch]) {
    for launch in launches {
        let arguments = launch.instance().kernel.arguments();
        for argument in arguments.iter().filter(|argument| argument.kind.is_pointer()) {
            let span = span(launch, argument.name, argument.kind);
            assert!(span < trial.limit, "{} of {launch:?} spans {span}", argument.name);
        }
    }
}

#[test]
fn every_view_stays_below_the_limit() {
    each_small_trial(assert_in_reach);
    each_huge_trial(assert_in_reach);
}

#[test]
fn what_fits_is_one_launch_from_the_given_addresses() {
    let mut random = Random(5);
    for seed in 0..200 {
        let shape = rectangle(&mut random, 600);
        let (kernel, wanted) = (random.of(&KERNELS), random.of(&CHOICES));
        let mut trial = Trial::new(kernel, shape, MAX_VIEW_BYTES, seed).with(wanted);
        (trial.first, trial.last) = (true, true);
        let launches = trial.launches(Target::Sm90).unwrap();
        let [part] = &parts(&trial, &launches)[..] else { panic!("{launches:?}") };
        let resident = if trial.resident_is_keys() { &part.keys } else { &part.queries };
        assert_eq!((&part.batch, resident), (&(0..shape.batch), &(0..trial.resident_rows())));
    }
}

#[test]
fn cuts_begin_at_tiles() {
    each_small_trial(|trial, launches| {
        for launch in trial.main(launches) {
            let (part, tile) = (trial.covered(launch), launch.instance().tile());
            assert_eq!(part.queries.start % tile.rows as usize, 0);
            assert_eq!(part.keys.start % (tile.keys as usize).max(1), 0);
        }
    });
}

#[test]
fn the_grid_has_a_block_per_tile_and_head_and_sections_divide_the_heads() {
    let check = |trial: &Trial, launches: &[Launch]| {
        for launch in trial.main(launches) {
            let (part, tile) = (trial.covered(launch), launch.instance().tile());
            let Rectangle { heads, kv_heads, .. } = trial.rectangle;
            let is_grouped = trial.kernel == Kernel::AddGradient;
            let (rows, tile, heads) = match trial.resident_is_keys() {
                true => (part.keys.len(), tile.keys, kv_heads),
                false => (part.queries.len(), tile.rows, if is_grouped { kv_heads } else { heads }),
            };
            let heads = heads * part.batch.len();
            let blocks = rows.div_ceil(tile as usize) * heads;
            assert_eq!(launch.grid, [blocks as u32, 1, 1]);
            if streams(trial) {
                assert_eq!(heads as i64 % integer(launch, "section"), 0);
            }
        }
    };
    each_small_trial(check);
    each_huge_trial(check);
}

#[test]
fn parameters_lie_in_order_at_their_natural_alignment() {
    for kernel in Kernel::ALL {
        let (arguments, places) = (kernel.arguments(), layout(kernel.arguments()));
        assert_eq!(places.len(), arguments.len());
        let mut end = 0;
        for (n, (argument, place)) in arguments.iter().zip(places).enumerate() {
            let (offset, size) = (usize::from(place.offset), usize::from(place.size));
            assert_eq!((usize::from(place.ordinal), size), (n, argument.kind.bytes()));
            assert!(offset % size == 0 && (end..end + size).contains(&offset));
            end = offset + size;
        }
    }
}
