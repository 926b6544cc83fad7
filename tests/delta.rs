//! The delta rule on the host agrees with the recurrence, token by token in float64.

mod common;

use burst_attention::Dtype;
use burst_attention::host::isa::Isa;
use burst_attention::host::linear::{StateGradient, Transfer, state_gradient, transfer};
use common::data::Array;
use common::recurrence::{CASE, Case, Data, Logs, NAMES, error, pool, recurrence, state};

/// Largest relative errors in the norm of float32 results: of outputs and states, and of gradients.
const VALUES: f64 = 2e-6;
const GRADIENTS: f64 = 1e-5;

fn cases() -> Vec<(Case, Isa)> {
    let case = Case { beta: 2.0, heads: [4, 2, 2], ..CASE };
    let logs = [Logs::Random, Logs::Of(1.0), Logs::Sometimes(70, f32::NEG_INFINITY)];
    let cases = logs
        .into_iter()
        .flat_map(|logs| [false, true].map(|by_channel| Case { logs, by_channel, ..case }));
    let isas = Isa::available();
    cases.flat_map(|case| isas.iter().map(move |isa| (case, *isa))).collect()
}

#[test]
fn thousands_of_tokens_keep_their_digits() {
    for (logs, beta) in [(Logs::Of(0.999), 1.0), (Logs::Of(1.0), 2.0), (Logs::Random, 2.0)] {
        let case = Case { batch: 1, tokens: 4096, heads: [1; 3], dims: [32, 24], ..CASE };
        for by_channel in [false, true] {
            let data = Data::new(Case { logs, beta, by_channel, ..case });
            data.run((Isa::best(), &pool(2)));
            for ((name, got), want) in NAMES.iter().zip(&data.results).zip(recurrence(&data)) {
                let bound = if ["o", "after"].contains(name) { VALUES } else { GRADIENTS };
                let error = error(&got.values(), &want);
                assert!(error <= bound, "{name} is off by {error:e}, {:?}", data.case);
            }
        }
    }
}

/// With A and M of a transfer, A S + M is the state after the tokens.
#[test]
fn a_transfer_says_what_tokens_do_to_any_state() {
    for (case, isa) in cases() {
        let data = Data::new(case);
        let device = (isa, &pool(2));
        data.run(device);
        let [batch, heads, k_dim, v_dim] = data.before.shape;
        let wide = k_dim + v_dim;
        let found = Array::zeros(Dtype::F32, [batch, heads, k_dim, wide]);
        transfer(
            device,
            &Transfer {
                k: &data.k.view(),
                v: &data.v.view(),
                log_decay: &data.logs.view(),
                beta: &data.beta.view(),
                out: &state(&found),
            },
        );
        let (found, before) = (found.values(), data.before.values());
        let mut after = Vec::new();
        for (matrix, row, column) in (0..batch * heads)
            .flat_map(|m| (0..k_dim).flat_map(move |r| (0..v_dim).map(move |c| (m, r, c))))
        {
            let row = &found[(matrix * k_dim + row) * wide..][..wide];
            let state = |k: usize| before[(matrix * k_dim + k) * v_dim + column];
            after.push(row[k_dim + column] + (0..k_dim).map(|k| row[k] * state(k)).sum::<f64>());
        }
        let error = error(&after, &data.results[1].values());
        assert!(error <= VALUES, "off by {error:e}, {isa}, {case:?}");
    }
}

#[test]
fn nothing_passes_a_reset_in_a_transfer() {
    let logs = Logs::Sometimes(9, f32::NEG_INFINITY);
    let mut data = Data::new(Case { logs, beta: 2.0, heads: [1; 3], batch: 1, ..CASE });
    data.k.set(0, f32::NAN);
    let [batch, heads, k_dim, v_dim] = data.before.shape;
    let found = Array::zeros(Dtype::F32, [batch, heads, k_dim, k_dim + v_dim]);
    let (k, v, log_decay) = (&data.k.view(), &data.v.view(), &data.logs.view());
    let (beta, out) = (&data.beta.view(), &state(&found));
    transfer((Isa::best(), &pool(1)), &Transfer { k, v, log_decay, beta, out });
    for row in found.values().chunks(k_dim + v_dim) {
        assert!(row[..k_dim].iter().all(|x| *x == 0.0), "{row:?}");
        assert!(row[k_dim..].iter().all(|x| x.is_finite()) && row[k_dim] != 0.0, "{row:?}");
    }
}

#[test]
fn the_gradient_of_the_state_alone_is_that_of_the_backward_pass() {
    for (case, isa) in cases() {
        let mut data = Data::new(Case { scale: 0.3, ..case });
        data.dafter = Array::zeros(Dtype::F32, data.dafter.shape);
        let device = (isa, &pool(2));
        data.run(device);
        let found = data.dafter.clone();
        let gradient = StateGradient {
            q: &data.q.view(),
            k: &data.k.view(),
            scale: data.case.scale,
            dout: &data.dout.view(),
            log_decay: &data.logs.view(),
            beta: &data.beta.view(),
            out: &state(&found),
        };
        state_gradient(device, &gradient);
        let error = error(&found.values(), &data.results[6].values());
        assert!(error <= VALUES, "off by {error:e}, {isa}, {case:?}");
    }
}
