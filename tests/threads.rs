//! Threads for work that may block.

use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use burst_attention::host::threads::spawn;

#[test]
fn jobs_that_wait_for_each_other_all_run_again_and_again() {
    for _ in 0..20 {
        let together = Arc::new(Barrier::new(50));
        let (done, all) = mpsc::channel();
        for _ in 0..50 {
            let (together, done) = (together.clone(), done.clone());
            spawn(move || {
                together.wait();
                done.send(()).expect("the test waits");
            });
        }
        for _ in 0..50 {
            all.recv_timeout(Duration::from_secs(20)).expect("no job waits for a thread");
        }
    }
}

#[test]
fn a_job_that_panics_takes_no_other_with_it() {
    spawn(|| panic!("on purpose"));
    let (done, all) = mpsc::channel();
    spawn(move || done.send(()).expect("the test waits"));
    all.recv_timeout(Duration::from_secs(20)).expect("the next job runs");
}
