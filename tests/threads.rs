//! Threads for work that may block.

use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use burst_attention::host::threads::{Reserved, reserve};

const PATIENCE: Duration = Duration::from_secs(20);

fn spawn(job: impl FnOnce() + Send + 'static) {
    reserve().expect("the system grants a thread").run(job);
}

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
            all.recv_timeout(PATIENCE).expect("no job waits for a thread");
        }
    }
}

#[test]
fn a_job_that_panics_takes_no_other_with_it() {
    spawn(|| panic!("on purpose"));
    let (done, all) = mpsc::channel();
    spawn(move || done.send(()).expect("the test waits"));
    all.recv_timeout(PATIENCE).expect("the next job runs");
}

#[test]
fn a_reserved_thread_is_not_used_for_another_job_unless_it_is_given_back() {
    let reserved: Vec<Reserved> = (0..4).map(|_| reserve().expect("a thread")).collect();
    drop(reserve().expect("a thread"));
    let together = Arc::new(Barrier::new(2 + reserved.len()));
    let (done, all) = mpsc::channel();
    let job = || {
        let (together, done) = (together.clone(), done.clone());
        move || {
            together.wait();
            done.send(()).expect("the test waits");
        }
    };
    spawn(job());
    spawn(job());
    reserved.into_iter().for_each(|thread| thread.run(job()));
    for _ in 0..6 {
        all.recv_timeout(PATIENCE).expect("all jobs run together");
    }
}
