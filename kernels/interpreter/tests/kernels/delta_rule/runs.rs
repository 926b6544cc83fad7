//! Runs of the kernels of the delta rule on a case.

use burst_attention_kernels::launch::{
    DeltaGrad, DeltaInverse, DeltaKeys, DeltaResults, DeltaState, DeltaTokens, LINEAR_TILE, Launch,
    LaunchError, column_tiles,
};
use burst_attention_kernels::variant::Decays;

use super::case::{Case, Inputs};
use crate::linear::channels::case::turned;
use crate::linear::twice;
use crate::world::{Array, Change, Scalar, Stores, World};

/// Inputs in memory, and the arrays of results.
struct Arrays {
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    sums: Array,
    beta: Array,
    inverse: Array,
    before: Array,
    values: Array,
    state: Array,
    transfer: Array,
    of_channels: Option<OfChannels>,
}

/// What decays of channels bring.
struct OfChannels {
    /// Queries and keys with their decays from the start of tiles, and keys with those to the end.
    faded: [Array; 3],
    /// Pairs of keys, and turned ones of queries and keys.
    pairs: [Array; 2],
    levels: [Array; 3],
}

impl OfChannels {
    fn new(case: &Case, inputs: &Inputs, world: &mut World) -> OfChannels {
        let Case { batch, rows, heads, head_dim, element, .. } = *case;
        let (of, logs) = case.channels(inputs);
        let Inputs { q, k, .. } = inputs;
        let faded = [
            ("qt", of.faded_from_start(&logs, q)),
            ("kt", of.faded_from_start(&logs, k)),
            ("kh", of.faded_to_end(&logs, k)),
        ];
        let pairs = [
            ("pairs", case.pairs(inputs, k)),
            ("turned pairs", turned(&case.pairs(inputs, q), heads)),
        ];
        let [[met, fades], [keys_met, _]] = [of.levels(&logs, q, k), of.levels(&logs, k, k)];
        let levels = [("met", met), ("keys_met", keys_met), ("fades", fades)];
        let mut filled = |name, scalar, shape: [usize; 4], x: &[f32]| {
            let array = world.rows(name, scalar, shape, 0);
            array.fill(&mut world.memory, 0..shape[1], x);
            array
        };
        let activations = Scalar::Activation(element);
        let keys = [batch, rows, heads, head_dim];
        let of_pairs = [batch, case.padded(), heads, LINEAR_TILE];
        let of_levels = [batch, rows, 6 * heads, head_dim];
        OfChannels {
            faded: faded.map(|(name, x)| filled(name, activations, keys, &x)),
            pairs: pairs.map(|(name, x)| filled(name, Scalar::F32, of_pairs, &x)),
            levels: levels.map(|(name, x)| filled(name, activations, of_levels, &x)),
        }
    }
}

fn at(array: &Array) -> u64 {
    array.rows(0).address
}

impl Arrays {
    fn new(case: &Case, inputs: &Inputs, world: &mut World) -> Arrays {
        let Case { batch, rows, heads, head_dim, value_dim, element, .. } = *case;
        let activations = Scalar::Activation(element);
        let mut tokens = |name, dim| world.rows(name, activations, [batch, rows, heads, dim], 0);
        let (q, k) = (tokens("q", head_dim), tokens("k", head_dim));
        let (v, dout) = (tokens("v", value_dim), tokens("dout", value_dim));
        let (inverse, values) = (tokens("inverse", LINEAR_TILE), tokens("values", value_dim));
        let count = batch * case.parts() * heads * head_dim;
        let of_channels = case.of_channels.then(|| OfChannels::new(case, inputs, world));
        let of_sums = match case.of_channels {
            false => [1, batch * heads, 1, case.padded()],
            true => [batch, case.padded(), heads, head_dim],
        };
        let sums = world.rows("sums", Scalar::F32, of_sums, 0);
        let mut floats = |name, rows, dim| world.rows(name, Scalar::F32, [1, rows, 1, dim], 0);
        let arrays = Arrays {
            q,
            k,
            v,
            dout,
            inverse,
            values,
            sums,
            beta: floats("beta", batch * heads, case.padded()),
            before: floats("before", count, value_dim),
            state: floats("state", count, value_dim),
            transfer: floats("transfer", count, head_dim),
            of_channels,
        };
        let memory = &mut world.memory;
        for (array, values) in [
            (&arrays.q, &inputs.q),
            (&arrays.k, &inputs.k),
            (&arrays.v, &inputs.v),
            (&arrays.dout, &inputs.dout),
        ] {
            array.fill(memory, 0..rows, values);
        }
        arrays.sums.fill(memory, 0..of_sums[1], &case.sums(inputs));
        arrays.beta.fill(memory, 0..batch * heads, &case.rates(inputs));
        arrays.before.fill(memory, 0..count, &inputs.before);
        arrays
    }

    /// Returns the address of queries, and of keys, as kernels that go through parts take them.
    fn rows(&self) -> [u64; 2] {
        match &self.of_channels {
            Some(OfChannels { faded: [q, k, _], .. }) => [at(q), at(k)],
            None => [at(&self.q), at(&self.k)],
        }
    }

    /// Returns the address of an array that decays of channels bring, otherwise 0.
    fn brought(&self, array: impl Fn(&OfChannels) -> &Array) -> u64 {
        self.of_channels.as_ref().map_or(0, |of| at(array(of)))
    }

    fn tokens(&self, case: &Case) -> DeltaTokens {
        DeltaTokens {
            batch: case.batch,
            rows: case.rows,
            heads: case.heads,
            head_dim: case.head_dim,
            value_dim: case.value_dim,
            element: case.element,
            part_rows: case.part,
            decays: if case.of_channels { Decays::KeyChannels } else { Decays::Heads },
            k: self.rows()[1],
            sums: at(&self.sums),
            beta: at(&self.beta),
            inverse: at(&self.inverse),
        }
    }

    fn description_of_inverse(&self, case: &Case) -> DeltaInverse {
        DeltaInverse { tokens: self.tokens(case), pairs: self.brought(|of| &of.pairs[0]) }
    }

    fn results(&self, of_tokens: bool) -> DeltaResults {
        if of_tokens {
            DeltaResults::Tokens { before: at(&self.before), values: at(&self.values) }
        } else {
            DeltaResults::Parts { state: at(&self.state), transfer: at(&self.transfer) }
        }
    }

    fn inputs(&self) -> Vec<&Array> {
        let mut inputs =
            vec![&self.q, &self.k, &self.v, &self.dout, &self.sums, &self.beta, &self.before];
        if let Some(OfChannels { faded, pairs, levels }) = &self.of_channels {
            inputs.extend(faded.iter().chain(pairs).chain(levels));
        }
        inputs
    }

    /// Checks which arrays launches stored, and returns the results.
    fn stored(&self, world: &World, results: &[&Array]) -> Result<Vec<Vec<f32>>, String> {
        let never: Vec<_> = self.inputs().into_iter().map(|array| (array, Stores::Never)).collect();
        world.audit(&never)?;
        let once: Vec<_> = results.iter().map(|&array| (array, Stores::Exactly(1))).collect();
        world.audit(&once)?;
        Ok(results.iter().map(|array| array.read(&world.memory)).collect())
    }
}

fn run(world: &mut World, launches: Result<Vec<Launch>, LaunchError>) -> Result<(), String> {
    world.run(launches.map_err(|error| error.to_string())?, |_| None)
}

/// Computes the inverses by kernels without a fault.
fn solve(case: &Case, arrays: &Arrays, world: &mut World) -> Result<(), String> {
    let change = std::mem::replace(&mut world.change, Change::None);
    let description = arrays.description_of_inverse(case);
    run(world, description.launches_within(case.target, case.limit))?;
    world.change = change;
    Ok(())
}

pub fn inverse(case: &Case, change: Change) -> Result<Vec<Vec<f32>>, String> {
    let inputs = case.inputs();
    twice(change, |world| {
        let arrays = Arrays::new(case, &inputs, world);
        let description = arrays.description_of_inverse(case);
        run(world, description.launches_within(case.target, case.limit))?;
        arrays.stored(world, &[&arrays.inverse])
    })
}

/// Returns corrected values, or states and transfers.
pub fn state(case: &Case, of_tokens: bool, change: Change) -> Result<Vec<Vec<f32>>, String> {
    let inputs = case.inputs();
    twice(change, |world| {
        let arrays = Arrays::new(case, &inputs, world);
        solve(case, &arrays, world)?;
        let (tokens, results) = (arrays.tokens(case), arrays.results(of_tokens));
        let kh = arrays.brought(|of| &of.faded[2]);
        let description = DeltaState { tokens, kh, v: at(&arrays.v), results };
        run(world, description.launches_within(case.target, case.limit))?;
        stored_pass(&arrays, world, of_tokens)
    })
}

/// Returns dY, or gradients of states and their transfers.
pub fn grad(case: &Case, of_tokens: bool, change: Change) -> Result<Vec<Vec<f32>>, String> {
    let inputs = case.inputs();
    twice(change, |world| {
        let arrays = Arrays::new(case, &inputs, world);
        solve(case, &arrays, world)?;
        let (tokens, results) = (arrays.tokens(case), arrays.results(of_tokens));
        let ([q, _], dout) = (arrays.rows(), at(&arrays.dout));
        let (kh, pairs) = (arrays.brought(|of| &of.faded[2]), arrays.brought(|of| &of.pairs[1]));
        let description = DeltaGrad { tokens, q, kh, dout, pairs, results };
        run(world, description.launches_within(case.target, case.limit))?;
        stored_pass(&arrays, world, of_tokens)
    })
}

fn stored_pass(arrays: &Arrays, world: &World, of_tokens: bool) -> Result<Vec<Vec<f32>>, String> {
    let Arrays { inverse, values, state, transfer, .. } = arrays;
    world.audit(&[(inverse, Stores::Exactly(1))])?;
    let (of_values, of_parts) = (vec![values], vec![state, transfer]);
    let (found, others) = if of_tokens { (of_values, of_parts) } else { (of_parts, of_values) };
    for array in others {
        world.audit(&[(array, Stores::Never)])?;
    }
    arrays.stored(world, &found)
}

/// Returns the gradient of keys, and its products with keys, from rounded results of the reference.
pub fn keys(case: &Case, change: Change) -> Result<Vec<Vec<f32>>, String> {
    let Case { batch, rows, heads, head_dim, value_dim, .. } = *case;
    let inputs = case.inputs();
    let exact = case.exact(&inputs);
    let found = twice(change, |world| {
        let arrays = Arrays::new(case, &inputs, world);
        let activations = Scalar::Activation(case.element);
        let mut of_values =
            |name| world.rows(name, activations, [batch, rows, heads, value_dim], 0);
        let (u, dv) = (of_values("u"), of_values("dv"));
        let dk = world.rows("dk", activations, [batch, rows, heads, head_dim], 0);
        let tiles = column_tiles(head_dim.max(value_dim), head_dim).expect("tiles");
        let of_dots = match case.of_channels {
            false => [1, batch * heads * tiles, 1, case.padded()],
            true => [batch, case.padded(), heads, head_dim],
        };
        let dots = world.rows("dots", Scalar::F32, of_dots, 0);
        let states = batch * case.parts() * heads;
        let shape = [1, states * value_dim, 1, head_dim];
        let turned = world.rows("turned", Scalar::F32, shape, 0);
        let memory = &mut world.memory;
        let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect::<Vec<_>>();
        u.fill(memory, 0..rows, &narrow(&exact.u));
        let rate = |at: usize| f64::from(inputs.rates[at / value_dim]);
        let of_rates: Vec<f64> = exact.dy.iter().enumerate().map(|(i, x)| x * rate(i)).collect();
        dv.fill(memory, 0..rows, &narrow(&of_rates));
        let column = |n: usize, c: usize| {
            let state = &inputs.before[n * head_dim * value_dim..][..head_dim * value_dim];
            state.iter().skip(c).step_by(value_dim).copied().collect::<Vec<_>>()
        };
        let columns = (0..states).flat_map(|n| (0..value_dim).map(move |c| (n, c)));
        let values: Vec<f32> = columns.flat_map(|(n, c)| column(n, c)).collect();
        turned.fill(memory, 0..states * value_dim, &values);
        let description = DeltaKeys {
            tokens: DeltaTokens { k: at(&arrays.k), ..arrays.tokens(case) },
            q: at(&arrays.q),
            levels: [0, 1, 2].map(|n| arrays.brought(|of| &of.levels[n])),
            u: at(&u),
            dout: at(&arrays.dout),
            dv: at(&dv),
            turned: at(&turned),
            dk: at(&dk),
            dots: at(&dots),
        };
        run(world, description.launches_within(case.target, case.limit))?;
        world.audit(&[(&u, Stores::Never), (&dv, Stores::Never), (&turned, Stores::Never)])?;
        arrays.stored(world, &[&dk, &dots])
    })?;
    if case.of_channels {
        let row = heads * head_dim;
        let of_entry = found[1].chunks(case.padded() * row).flat_map(|entry| &entry[..rows * row]);
        return Ok(vec![found[0].clone(), of_entry.copied().collect()]);
    }
    let tiles = column_tiles(head_dim.max(value_dim), head_dim).expect("tiles");
    let sums = (0..batch * heads).flat_map(|head| (0..rows).map(move |row| (head, row)));
    let sums = sums.map(|(head, row)| {
        (0..tiles).map(|tile| found[1][(head * tiles + tile) * case.padded() + row]).sum()
    });
    Ok(vec![found[0].clone(), sums.collect()])
}
