// The pool of threads under the thread sanitizer: jobs of different sizes from two callers at a
// time, with memory handed from worker to worker between parts. `stress_pool SEED SECONDS`.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "pool.h"

using namespace unspool;

namespace {

constexpr int kMost = 4;
constexpr int kRounds = 5;

struct Work {
    Progress progress[kRounds];
    int64_t numbers[kRounds][kMost] = {};  // plain memory: only the end of a part keeps order
    std::atomic<int64_t> taken{0};
};

void job(void* what, int, int count) {
    Work& work = *static_cast<Work*>(what);
    Worker worker{count, work.progress, nullptr};
    for (int round = 0; round < kRounds; ++round) {
        worker.for_each(round, kMost, [&](int64_t task) {
            int64_t sum = 1;
            for (int other = 0; round > 0 && other < kMost; ++other)
                sum += work.numbers[round - 1][other];
            work.numbers[round][task] = sum;
            work.taken.fetch_add(1);
        });
    }
}

bool correct(int count) {
    Work work;
    if (!run_on_pool(count, job, &work)) return false;
    int64_t expected = 1;
    for (int round = 1; round < kRounds; ++round) expected = 1 + kMost * expected;
    for (int task = 0; task < kMost; ++task) {
        if (work.numbers[kRounds - 1][task] != expected) return false;
    }
    return work.taken.load() == kRounds * kMost;
}

}  // namespace

int main(int, char** arguments) {
    const auto end = std::chrono::steady_clock::now() +
                     std::chrono::milliseconds(static_cast<int>(1000 * std::atof(arguments[2])));
    std::atomic<int> jobs{0}, wrong{0};
    const auto call = [&](uint64_t seed) {
        std::mt19937_64 random_bits(seed);
        while (std::chrono::steady_clock::now() < end && wrong.load() == 0) {
            if (!correct(1 + static_cast<int>(random_bits() % kMost))) wrong.fetch_add(1);
            jobs.fetch_add(1);
            // Now and then a pause, so that the workers fall asleep.
            if (random_bits() % 64 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    };
    const uint64_t seed = static_cast<uint64_t>(std::atoll(arguments[1]));
    std::thread second(call, seed + 1);
    call(seed);
    second.join();
    std::printf("%d jobs, %d wrong\n", jobs.load(), wrong.load());
    std::fflush(stdout);
    std::_Exit(wrong.load() != 0 || jobs.load() < 10);  // the pool's threads never end
}
