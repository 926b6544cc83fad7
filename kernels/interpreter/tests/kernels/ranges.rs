//! `segment_ranges`: compares its results with all pairs of rows.

use burst_attention_kernels::launch::{Features, Forward, Launch, Rows, Segments};

use super::case::{CASE, Case, NONE, Random};
use super::world::{Change, Scalar, Stores, World, prepares};

/// A function of entry, row and random number that gives the row's segment.
type Pattern = fn(usize, usize, u64) -> i32;

/// Sorted documents of 40 rows.
const SORTED: Pattern = |b, row, _| ((row + 7 * b) / 40) as i32;
/// Sorted documents of 700 rows.
const LONG: Pattern = |b, row, _| ((row + 90 * b) / 700) as i32;
/// Each row is a document.
const SINGLE: Pattern = |_, row, _| row as i32;
/// Long documents in any order, repeated.
const TURNED: Pattern = |b, row, _| [5, 0, 3, 0][(row + 30 * b) / 150 % 4];
/// A few documents, then padding.
const PADDED: Pattern = |b, row, _| if row < 100 + 50 * b { (row / 60) as i32 } else { -1 };
/// Padding before the document, of the most negative segment.
const LATE: Pattern = |_, row, _| if row < 130 { i32::MIN } else { i32::MAX };
const ANY: Pattern = |_, _, random| (random % 7) as i32 - 2;
const ALL: [Pattern; 7] = [SORTED, LONG, SINGLE, TURNED, PADDED, LATE, ANY];

/// Returns segments `[batch][rows]`.
fn segments(pattern: Pattern, batch: usize, rows: usize, seed: u64) -> Vec<Vec<i32>> {
    let mut random = Random(seed);
    let mut next = || {
        random.normal();
        random.0 >> 33
    };
    (0..batch).map(|b| (0..rows).map(|row| pattern(b, row, next())).collect()).collect()
}

/// Returns the launches of the forward pass that prepare others. Tests do not run the forward pass
/// itself, whose arrays do not exist.
pub fn preparations(case: &Case, features: Features) -> Result<Vec<Launch>, String> {
    let at = Rows { address: 4096, batch_stride: 1 << 20 };
    let description = Forward {
        rectangle: case.rectangle(&(0..case.q_len), &(0..case.kv_len)),
        features,
        q: at,
        k: at,
        v: at,
        acc: None,
        row_max: None,
        row_sum: None,
        o: Some(at),
        lse: Some(at),
        first: true,
        last: true,
    };
    let mut launches = description.launches(case.target).map_err(|error| error.to_string())?;
    launches.retain(|launch| prepares(launch.instance().kernel));
    Ok(launches)
}

/// Runs the kernel. Returns (begin, same, differs, end) of each 64 rows, `[batch][blocks]`.
fn run(
    own: &[Vec<i32>],
    others: &[Vec<i32>],
    change: Change,
) -> Result<Vec<Vec<[i32; 4]>>, String> {
    let (batch, q_len, kv_len) = (own.len(), own[0].len(), others[0].len());
    let mut world = World::new(3, change);
    let mut place =
        |name, rows, margin, dim| world.rows(name, Scalar::I32, [batch, rows, 1, dim], margin);
    let blocks = q_len.div_ceil(64);
    let queries = place("segments", q_len, 3, 1);
    let keys = place("others", kv_len, 5, 1);
    let ranges = place("ranges", blocks, 1, 4);
    for (array, values) in [(&queries, own), (&keys, others)] {
        for (b, entry) in values.iter().enumerate() {
            for (row, &segment) in entry.iter().enumerate() {
                array.put_word(&mut world.memory, (b, row), segment);
            }
        }
    }
    let case = Case { batch, q_len, kv_len, band: NONE, ..CASE };
    let segments =
        Segments { queries: queries.rows(0), keys: keys.rows(0), ranges: ranges.rows(0) };
    let features = Features { segments: Some(segments), ..Features::default() };
    let launches = preparations(&case, features)?;
    assert_eq!(launches.len(), 1);
    world.run(launches, |_| None)?;
    world.audit(&[(&queries, Stores::Never), (&keys, Stores::Never)])?;
    world.audit(&[(&ranges, Stores::Exactly(1))])?;
    let entry = |b| (0..blocks).map(|block| ranges.words(&world.memory, (b, block))).collect();
    Ok((0..batch).map(entry).collect())
}

/// Checks the properties that kernels rely on: rows see nothing outside of begin..end, and all
/// pairs with rows same..differs are of one segment that is not negative. For documents in order
/// the ranges must be as narrow as blocks of 64 rows allow.
fn check(own: &[Vec<i32>], others: &[Vec<i32>], change: Change) -> Result<(), String> {
    let found = run(own, others, change)?;
    for (b, blocks) in found.iter().enumerate() {
        for (block, &numbers) in blocks.iter().enumerate() {
            let rows = &own[b][block * 64..own[b].len().min(block * 64 + 64)];
            check_block(rows, &others[b], numbers)
                .map_err(|error| format!("{error}: {numbers:?} of block {block} of entry {b}"))?;
        }
    }
    Ok(())
}

fn check_block(rows: &[i32], others: &[i32], numbers: [i32; 4]) -> Result<(), String> {
    if numbers.iter().any(|number| number % 64 != 0 || *number < 0) {
        return Err("no multiple of 64".into());
    }
    let [begin, same, differs, end] = numbers.map(|number| number as usize);
    let is_seen = |&(_, segment): &(usize, &i32)| *segment >= 0 && rows.contains(segment);
    let seen: Vec<_> = others.iter().enumerate().filter(is_seen).map(|(at, _)| at).collect();
    if let Some(at) = seen.iter().find(|&&at| !(begin..end).contains(&at)) {
        return Err(format!("row {at} is seen"));
    }
    let even = |at: usize| others[at] >= 0 && rows.iter().all(|&row| row == others[at]);
    let len = others.len();
    if let Some(at) = (same.min(len)..differs.min(len)).find(|&at| !even(at)) {
        return Err(format!("row {at} differs"));
    }
    let sorted = |segments: &[i32]| {
        let follows = |pair: &[i32]| (pair[0]..=pair[0].saturating_add(1)).contains(&pair[1]);
        let no_gaps = segments.windows(2).all(follows);
        no_gaps && segments.first() >= Some(&0)
    };
    if sorted(rows) && sorted(others) && rows.len() == 64 {
        let (first, last) = (seen.first().copied(), seen.last().copied());
        let expected = first.zip(last).map(|(first, last)| (first / 64, last / 64 + 1));
        let blocks = others.chunks_exact(64).enumerate();
        let mut whole = blocks.filter(|(at, _)| (at * 64..at * 64 + 64).all(even));
        let first_whole = whole.next().map(|(at, _)| at);
        let behind = whole.next_back().map(|(at, _)| at).or(first_whole).map(|at| at + 1);
        if expected.is_some_and(|(first, _)| begin != first * 64) {
            return Err(format!("it begins early, not at {expected:?}"));
        }
        if let Some((first, behind)) = first_whole.zip(behind)
            && (same != first * 64 || differs < behind * 64)
        {
            return Err(format!("blocks {first}..{behind} are even"));
        }
        // Rows beyond the end read as segment 0, so the last block seems to have all segments.
        if expected.is_some_and(|(_, past)| end != past * 64) && len.is_multiple_of(64) {
            return Err(format!("it ends late, not at {expected:?}"));
        }
    }
    Ok(())
}

#[test]
fn ranges_of_rows_that_segments_let_others_see() {
    const LENGTHS: [usize; 6] = [1, 63, 64, 65, 200, 2200];
    for (n, pattern) in ALL.into_iter().enumerate() {
        for rows in LENGTHS {
            let own = segments(pattern, 2, rows, 1);
            let pairs = [(pattern, rows), (pattern, 2111), (ALL[(n + 3) % 7], LENGTHS[n % 6])];
            for (of_others, len) in pairs {
                let others = segments(of_others, 2, len, 5);
                check(&own, &others, Change::None)
                    .unwrap_or_else(|error| panic!("pattern {n}, {rows} × {len}: {error}"));
            }
        }
    }
}

#[test]
#[ignore = "takes long: make test-full"]
fn ranges_of_all_patterns_and_lengths() {
    const LENGTHS: [usize; 7] = [1, 63, 64, 65, 200, 2112, 5000];
    for (n, pattern) in ALL.into_iter().enumerate() {
        for (m, of_others) in ALL.into_iter().enumerate() {
            for (rows, len) in LENGTHS.map(|rows| LENGTHS.map(|len| (rows, len))).concat() {
                let own = segments(pattern, 3, rows, 1);
                let others = segments(of_others, 3, len, 5);
                check(&own, &others, Change::None)
                    .unwrap_or_else(|error| panic!("{n} and {m}, {rows} × {len}: {error}"));
            }
        }
    }
}
