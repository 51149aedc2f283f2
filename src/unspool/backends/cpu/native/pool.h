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

    void finish(int32_t tasks, int32_t mine);
    void wait(int32_t tasks);
};

constexpr int kParts = 4;  // that an operation can have, one after the other

// One thread's view of a run.
struct Worker {
    int count;
    Progress* progress;  // of the operation at hand, kParts of them
    uint8_t* scratch;    // this thread's own memory

    // Calls f with every task from 0 to `tasks` that no other worker takes, and comes back when
    // all of them are done.
    template <class F>
    void each(int part, int64_t tasks, F f) {
        if (count == 1) {
            for (int64_t task = 0; task < tasks; ++task) f(task);
            return;
        }
        Progress& ours = progress[part];
        int32_t mine = 0;
        for (;;) {
            const int64_t task = ours.next.fetch_add(1, std::memory_order_relaxed);
            if (task >= tasks) break;
            f(task);
            ++mine;
        }
        ours.finish(static_cast<int32_t>(tasks), mine);
        ours.wait(static_cast<int32_t>(tasks));
    }
};

// Into how many tasks to cut `pieces`, at the most `share` for each worker.
inline int64_t cut(int64_t pieces, const Worker& worker, int64_t share) {
    const int64_t most = worker.count == 1 ? 1 : worker.count * share;
    return pieces < most ? pieces : most;
}

// Calls f with every row from 0 to `rows`, some of them a task.
template <class F>
inline void each_row(Worker& worker, int part, int64_t rows, F f) {
    const int64_t tasks = cut(rows, worker, 4);
    worker.each(part, tasks, [&](int64_t task) {
        for (int64_t row = rows * task / tasks; row < rows * (task + 1) / tasks; ++row) f(row);
    });
}

using Job = void (*)(void* what, int index, int count);

// Run a job on `count` threads, the caller among them, and wait for all. Gives false if threads
// could not be started. One job runs at a time; others wait for their turn.
bool run_on_pool(int count, Job job, void* what);

}  // namespace unspool
