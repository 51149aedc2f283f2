#include "pool.h"

#include <new>

#if !defined(__wasm__)
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#endif
#if !defined(_WIN32) && !defined(__wasm__)
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unspool {
namespace {

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // `yield` does nothing on most cores; this waits briefly
#endif
}

constexpr int kSpinsInside = 3000;        // within a run: waits are short
constexpr int kSpinsBeforeSleep = 20000;  // between runs: the next token follows soon

// Sleeps while the number equals `expected`; woken by wake_all (or spuriously).
void sleep_while(std::atomic<int32_t>* number, int32_t expected) {
#if defined(__linux__)
    syscall(SYS_futex, number, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
#elif defined(__wasm__)
    __builtin_wasm_memory_atomic_wait32(reinterpret_cast<int32_t*>(number), expected, -1);
#else
    if (number->load() == expected) std::this_thread::yield();
#endif
}

void wake_all(std::atomic<int32_t>* number) {
#if defined(__linux__)
    syscall(SYS_futex, number, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#elif defined(__wasm__)
    __builtin_wasm_memory_atomic_notify(reinterpret_cast<int32_t*>(number), -1);
#else
    (void)number;
#endif
}

}  // namespace

void Progress::finish(int32_t tasks, int32_t finished) {
    if (finished == 0) return;
    // Sequentially consistent with `asleep` below: either we see the sleeper, or it sees that all
    // is done.
    const int32_t all = done.fetch_add(finished) + finished;
    if (all == tasks && asleep.load() > 0) wake_all(&done);
}

void Progress::wait(int32_t tasks) {
    for (int spin = 0; spin < kSpinsInside; ++spin) {
        if (done.load(std::memory_order_acquire) >= tasks) return;
        pause_briefly();
    }
    // The other threads are not running: spinning would only take time from them.
    asleep.fetch_add(1);
    for (int32_t now = done.load(); now < tasks; now = done.load()) sleep_while(&done, now);
    asleep.fetch_sub(1);
}

#if defined(__wasm__)

// Threads are workers of the browser: the page starts each of them with the same memory, where it
// calls unspool_work and stays.
namespace {

struct Pool {
    std::atomic<int32_t> call{0};  // number of the job
    Progress others;               // one task for each thread but the caller
    Job job = nullptr;
    void* argument = nullptr;
    int count = 1;
};

Pool pool;

}  // namespace

bool run_on_pool(int count, Job job, void* argument) {
    if (count > 1) {
        pool.job = job;
        pool.argument = argument;
        pool.count = count;
        new (&pool.others) Progress;
        pool.call.fetch_add(1);
        wake_all(&pool.call);
    }
    job(argument, 0, count);
    if (count > 1) pool.others.wait(count - 1);
    return true;
}

}  // namespace unspool

// Takes part in every job with more than one thread, as thread `index` from 1 on; never returns.
extern "C" void unspool_work(int32_t index) {
    using namespace unspool;
    for (int32_t last_call = 0;; ++last_call) {
        for (int spin = 0; spin < kSpinsBeforeSleep; ++spin) {
            if (pool.call.load() != last_call) break;
            pause_briefly();
        }
        while (pool.call.load() == last_call) sleep_while(&pool.call, last_call);
        pool.job(pool.argument, index, pool.count);
        pool.others.finish(pool.count - 1, 1);
    }
}

extern "C" int __cxa_thread_atexit(void (*)(void*), void*, void*) { return 0; }  // none ends

#else

namespace {

// Blocks signals in this thread, and in threads it starts: handlers never run on worker threads.
class BlockedSignals {
#if defined(_WIN32)  // has no signals of this kind
public:
    BlockedSignals() {}
    ~BlockedSignals() {}
#else
public:
    BlockedSignals() {
        sigset_t every;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before_);
    }
    ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

private:
    sigset_t before_;
#endif
};

// Identifies the process; a forked child has another number than its parent.
int64_t process_id() {
#if defined(_WIN32)
    return 0;  // there is no fork
#else
    return getpid();
#endif
}

constexpr int kCountBits = 16;
constexpr uint64_t kCountMask = (1u << kCountBits) - 1;

struct Pool {
    std::mutex run_lock;  // held while a job runs
    std::mutex sleeping;
    std::condition_variable wake;
    // Job number and, in the low bits, its thread count (caller included): in one word, so that a
    // thread that missed a job never confuses it with the next.
    std::atomic<uint64_t> call{0};
    std::atomic<int> unfinished{0};
    std::atomic<int> asleep{0};
    Job job = nullptr;
    void* argument = nullptr;
    int threads = 0;  // started so far, not counting the caller
    int64_t process = process_id();

    void work(int index, uint64_t last_call) {
        for (;;) {
            last_call = next_call(last_call);
            const int count = static_cast<int>(last_call & kCountMask);
            if (index >= count) continue;
            job(argument, index, count);
            unfinished.fetch_sub(1, std::memory_order_release);
        }
    }

    uint64_t next_call(uint64_t last_call) {
        for (int spin = 0; spin < kSpinsBeforeSleep; ++spin) {
            const uint64_t now = call.load(std::memory_order_acquire);
            if (now != last_call) return now;
            pause_briefly();
        }
        std::unique_lock<std::mutex> lock(sleeping);
        asleep.fetch_add(1);
        wake.wait(lock, [&] { return call.load(std::memory_order_acquire) != last_call; });
        asleep.fetch_sub(1);
        return call.load(std::memory_order_acquire);
    }

    bool start_threads(int count) {
        const BlockedSignals blocked;
        try {
            while (threads < count - 1) {
                const int index = threads + 1;
                const uint64_t last_call = call.load();
                std::thread([this, index, last_call] { work(index, last_call); }).detach();
                ++threads;
            }
        } catch (const std::system_error&) {
            return false;
        }
        return true;
    }

    bool run(int count, Job new_job, void* new_argument) {
        std::lock_guard<std::mutex> finished(run_lock);
        if (!start_threads(count)) return false;
        job = new_job;
        argument = new_argument;
        unfinished.store(count - 1, std::memory_order_relaxed);
        {
            // Under the lock, so that a thread about to sleep cannot miss it.
            std::lock_guard<std::mutex> lock(sleeping);
            const uint64_t number = call.load(std::memory_order_relaxed) >> kCountBits;
            call.store((number + 1) << kCountBits | static_cast<uint64_t>(count),
                       std::memory_order_release);
        }
        if (asleep.load() > 0) wake.notify_all();
        job(argument, 0, count);
        for (int spin = 0; unfinished.load(std::memory_order_acquire) > 0; ++spin) {
            if (spin < kSpinsInside)
                pause_briefly();
            else
                std::this_thread::yield();
        }
        return true;
    }
};

// A forked child has none of its parent's threads, so it gets a new pool. A pool is never
// destroyed, because its threads never end.
Pool& pool() {
    static std::atomic<Pool*> current{nullptr};
    static std::mutex create_lock;
    Pool* instance = current.load(std::memory_order_acquire);
    if (instance == nullptr || instance->process != process_id()) {
        std::lock_guard<std::mutex> lock(create_lock);
        instance = current.load(std::memory_order_acquire);
        if (instance == nullptr || instance->process != process_id()) {
            instance = new Pool;
            current.store(instance, std::memory_order_release);
        }
    }
    return *instance;
}

}  // namespace

bool run_on_pool(int count, Job job, void* argument) {
    if (count <= 1) {
        job(argument, 0, 1);
        return true;
    }
    return pool().run(count, job, argument);
}

}  // namespace unspool

#endif
