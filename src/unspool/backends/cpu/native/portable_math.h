// exp, log and log1p with the same bits on every processor and with every C library.
//
// They use only operations that IEEE 754 defines exactly, in double precision and in a fixed order;
// the error is about 1e-15, so a result rounded to float is nearly always the nearest float.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>

namespace unspool {

constexpr double kLn2High = 0x1.62e42fee00000p-1;  // its last 21 bits are 0: n * kLn2High is exact
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;

inline double power_of_two(int64_t n) {  // within the range of normal numbers
    const uint64_t bits = static_cast<uint64_t>(n + 1023) << 52;
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline double portable_exp(double x) {
    if (!(x > -745.2)) return x != x ? x : 0.0;
    if (x > 709.79) return std::numeric_limits<double>::infinity();
    const double shift = 0x1.8p52;  // adding it rounds to an integer
    const double n = (x * 0x1.71547652b82fep0 + shift) - shift;
    const double r = (x - n * kLn2High) - n * kLn2Low;
    double p = 1.0 / 6227020800.0;  // 1 / 13!
    constexpr double factorials[] = {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0,
                                     720.0,       120.0,      24.0,      6.0,      2.0};
    for (const double factorial : factorials) p = p * r + 1.0 / factorial;
    p = (p * r) * r + r + 1.0;
    const int64_t half = static_cast<int64_t>(n) / 2;  // two factors: the result may be subnormal
    return p * power_of_two(half) * power_of_two(static_cast<int64_t>(n) - half);
}

// 2 * atanh(s) = log((1 + s) / (1 - s)), for |s| < 0.172.
inline double log_series(double s) {
    const double square = s * s;
    double p = 0.0;
    for (int k = 25; k >= 3; k -= 2) p = (p + 1.0 / k) * square;
    return 2.0 * s + 2.0 * s * p;
}

inline double portable_log(double x) {
    if (!(x > 0.0)) {
        if (x == 0.0) return -std::numeric_limits<double>::infinity();
        return std::numeric_limits<double>::quiet_NaN();
    }
    if (x == std::numeric_limits<double>::infinity()) return x;
    int64_t exponent = 0;
    if (x < 0x1p-1022) {
        x *= 0x1p54;
        exponent = -54;
    }
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    exponent += static_cast<int64_t>(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffu) | 0x3ff0000000000000u;
    double m;
    std::memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        ++exponent;
    }
    const double n = static_cast<double>(exponent);
    return n * kLn2High + (log_series((m - 1.0) / (m + 1.0)) + n * kLn2Low);
}

// log(1 + x), x > -1.
inline double portable_log1p(double x) {
    return x > -0.25 && x < 0.4 ? log_series(x / (2.0 + x)) : portable_log(1.0 + x);
}

inline float portable_exp(float x) {
    return static_cast<float>(portable_exp(static_cast<double>(x)));
}
inline float portable_log(float x) {
    return static_cast<float>(portable_log(static_cast<double>(x)));
}

}  // namespace unspool
