//! What ranks need of each other, from the definition of the mask alone.

use burst_attention::Layout;
use burst_attention::problem::{Pass, Problem, Travels};
use burst_attention::schedule::{Family, QUERY_GRAIN, Schedule, Transfer, schedule};

/// Which rows of a chunk a rank computes with. Queries count in whole grains, and in the striped
/// layout a rank needs all rows or none.
pub fn needed(problem: &Problem, travels: Travels, owner: usize, at: usize) -> Vec<bool> {
    let Problem { layout, world_size, q_len, kv_len, window, .. } = *problem;
    let query = |rank, row| layout.position(rank, row, world_size, q_len);
    let key = |rank, row| layout.position(rank, row, world_size, kv_len);
    let rows: Vec<bool> = match travels {
        Travels::Keys => {
            let seen = |j| (0..q_len).any(|i| window.allows(query(at, i), key(owner, j)));
            (0..kv_len).map(seen).collect()
        }
        Travels::Queries => {
            let sees = |i| (0..kv_len).any(|j| window.allows(query(owner, i), key(at, j)));
            let mut rows: Vec<bool> = (0..q_len).map(sees).collect();
            for range in layout.strided_ranges(owner, world_size, q_len) {
                let grains = rows[range.rows].chunks_mut(QUERY_GRAIN);
                grains.for_each(|grain| grain.fill(grain.contains(&true)));
            }
            rows
        }
    };
    let any = rows.contains(&true);
    if layout == Layout::Striped { vec![any; rows.len()] } else { rows }
}

/// Rows of inputs and of accumulators in the messages that `counts`, sent by all ranks.
pub fn rows_sent(schedules: &[Schedule], counts: impl Fn(usize, &Transfer) -> bool) -> [usize; 2] {
    [false, true].map(|accumulators| {
        let sends = schedules.iter().flat_map(|s| s.sends().map(move |send| (s.rank, send)));
        let of_kind = sends.filter(|(_, send)| send.chunk.payload.is_accumulator() == accumulators);
        of_kind
            .filter(|(rank, send)| counts(*rank, send))
            .map(|(_, send)| send.chunk.rows.len())
            .sum()
    })
}

/// Every family that fits `world_size` ranks, with every length of inner rings.
pub fn families(world_size: usize) -> Vec<Family> {
    let inner = |family: Family| if family.inner().is_some() { 1..=world_size } else { 1..=1 };
    let sized = |family: Family| inner(family).map(move |inner| family.with_inner(inner));
    let all = Family::ALL.into_iter().flat_map(sized);
    all.filter(|family| family.validate(world_size).is_ok()).collect()
}

/// One of every family that fits `world_size` ranks, with inner rings of `inner` ranks.
pub fn families_with_inner(world_size: usize, inner: usize) -> impl Iterator<Item = Family> {
    let all = Family::ALL.into_iter().map(move |family| family.with_inner(inner));
    all.filter(move |family| family.validate(world_size).is_ok())
}

/// The schedules of a family that fits the number of ranks.
pub fn made(problem: &Problem, family: Family, pass: Pass, travels: Travels) -> Vec<Schedule> {
    schedule(problem, family, pass, travels).expect("the family fits")
}
