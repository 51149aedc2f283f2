// The thread pool: one per process, shared by all models.
#pragma once
#include <atomic>
#include <cstdint>

namespace unspool {

// Progress of the workers in one phase of an operation. Tasks are taken one by one, and the phase
// ends when all are done, not when all workers arrive: a descheduled thread without a task does not
// delay the others.
struct alignas(64) Progress {
    std::atomic<int32_t> next{0};  // next free task
    // On a separate cache line: waiting threads poll it and must not slow down `next`.
    alignas(64) std::atomic<int32_t> done{0};
    std::atomic<int32_t> asleep{0};

    void finish(int32_t tasks, int32_t finished);
    void wait(int32_t tasks);
};

constexpr int kPhases = 4;  // maximum number of phases of an operation

// One thread of a run.
struct Worker {
    int count;
    Progress* progress;  // of the current operation, kPhases entries
    uint8_t* scratch;    // memory of this thread

    // Calls f with tasks below `tasks` that no other worker takes; returns when all are done.
    template <class F>
    void for_each(int phase, int64_t tasks, F f) {
        if (count == 1) {
            for (int64_t task = 0; task < tasks; ++task) f(task);
            return;
        }
        Progress& current = progress[phase];
        int32_t finished = 0;
        for (;;) {
            const int64_t task = current.next.fetch_add(1, std::memory_order_relaxed);
            if (task >= tasks) break;
            f(task);
            ++finished;
        }
        current.finish(static_cast<int32_t>(tasks), finished);
        current.wait(static_cast<int32_t>(tasks));
    }
};

// Number of tasks for `pieces`: at most `tasks_per_worker` for each worker.
inline int64_t num_tasks(int64_t pieces, const Worker& worker, int64_t tasks_per_worker) {
    const int64_t limit = worker.count == 1 ? 1 : worker.count * tasks_per_worker;
    return pieces < limit ? pieces : limit;
}

// Calls f with every row below `rows`, several rows per task.
template <class F>
inline void for_each_row(Worker& worker, int phase, int64_t rows, F f) {
    const int64_t tasks = num_tasks(rows, worker, 4);
    worker.for_each(phase, tasks, [&](int64_t task) {
        for (int64_t row = rows * task / tasks; row < rows * (task + 1) / tasks; ++row) f(row);
    });
}

using Job = void (*)(void* argument, int index, int count);

// Runs a job on `count` threads including the caller, and waits for all. Returns false if threads
// could not be started. One job runs at a time; others wait.
bool run_on_pool(int count, Job job, void* argument);

}  // namespace unspool
