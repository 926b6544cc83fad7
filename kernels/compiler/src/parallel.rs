//! Work on all cores.

use std::sync::Mutex;
use std::thread;

/// Returns `make` of each item, in the order of the items. As many threads as there are cores
/// compute it, each with `stack` bytes of stack.
pub fn on_all_cores<T: Sync, R: Send>(
    items: &[T],
    stack: usize,
    make: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let left = Mutex::new(items.iter().enumerate());
    let next = || left.lock().expect("no panics").next();
    let made = Mutex::new(Vec::with_capacity(items.len()));
    let work = || {
        while let Some((index, item)) = next() {
            let result = make(item);
            made.lock().expect("no panics").push((index, result));
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            let builder = thread::Builder::new().stack_size(stack);
            builder.spawn_scoped(scope, work).expect("threads can be started");
        }
    });
    let mut made = made.into_inner().expect("no panics");
    made.sort_by_key(|(index, _)| *index);
    made.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::on_all_cores;

    #[test]
    fn results_are_in_the_order_of_their_items() {
        let items: Vec<u64> = (0..100).collect();
        let squares = on_all_cores(&items, 1 << 20, |&item| {
            // The first items take longest.
            std::thread::sleep(std::time::Duration::from_micros(100 - item));
            item * item
        });
        assert!(items.iter().map(|item| item * item).eq(squares));
        assert!(on_all_cores(&[], 1 << 20, |item: &u64| *item).is_empty());
    }
}
