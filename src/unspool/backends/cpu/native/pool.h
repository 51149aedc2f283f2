// The threads: one pool for the whole process, shared by every model in it.
#pragma once
#include <atomic>
#include <cstdint>

namespace unspool {

// How far the workers are with one part of an operation. Tasks are taken one by one, and the part
// is over when all of them are done: nobody waits for a worker that has none, so a thread whose
// core is busy with something else does not hold up the others.
struct alignas(64) Progress {
    std::atomic<int32_t> next{0};  // the first task that nobody has taken
    // On a line of its own: who waits looks at it all the time, and must not slow down who takes.
    alignas(64) std::atomic<int32_t> done{0};
    std::atomic<int32_t> asleep{0};

    void finish(int32_t tasks, int32_t finished);
    void wait(int32_t tasks);
};

constexpr int kPhases = 4;  // that an operation can have, one after the other

// One thread's view of a run.
struct Worker {
    int count;
    Progress* progress;  // of the operation at hand, kParts of them
    uint8_t* scratch;    // this thread's own memory

    // Calls f with every task from 0 to `tasks` that no other worker takes, and comes back when
    // all of them are done.
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

// Into how many tasks to cut `pieces`, at the most `share` for each worker.
inline int64_t num_tasks(int64_t pieces, const Worker& worker, int64_t tasks_per_worker) {
    const int64_t limit = worker.count == 1 ? 1 : worker.count * tasks_per_worker;
    return pieces < limit ? pieces : limit;
}

// Calls f with every row from 0 to `rows`, some of them a task.
template <class F>
inline void for_each_row(Worker& worker, int phase, int64_t rows, F f) {
    const int64_t tasks = num_tasks(rows, worker, 4);
    worker.for_each(phase, tasks, [&](int64_t task) {
        for (int64_t row = rows * task / tasks; row < rows * (task + 1) / tasks; ++row) f(row);
    });
}

using Job = void (*)(void* argument, int index, int count);

// Run a job on `count` threads, the caller among them, and wait for all. Gives false if threads
// could not be started. One job runs at a time; others wait for their turn.
bool run_on_pool(int count, Job job, void* argument);

}  // namespace unspool
