// The C interface of `unspool.sampling`: operations on contiguous logits [rows, width], each row by
// itself. A logit of -inf is not a candidate.
//
// Each call fills one array of 8-byte values, [parts, rows, ...]: in Python, getting the address of
// a second array costs more than the call.
#pragma once
#include <cstdint>

#include "export.h"

namespace unspool {
// The `count` largest of a row, largest first, ties by lower column: each value, and its column
// `column_offset` elements after it.
void top_k(const float* logits, int64_t width, int64_t count, double* values,
           int64_t column_offset);
// Counts distinct tokens: see unspool_tally.
int64_t count_tokens(const int64_t* tokens, int64_t count, int64_t vocabulary, int64_t* unique);
}  // namespace unspool

// Replace `count` numbers by their exponentials or natural logarithms: see portable_math.h.
UNSPOOL_API void unspool_exp(double* numbers, int64_t count);
UNSPOOL_API void unspool_log(double* numbers, int64_t count);

// The largest logit of each row; NaN if the row has one.
UNSPOOL_API void unspool_peaks(const float* logits, int64_t rows, int64_t width, double* peaks);

// The peaks [rows] (input if `has_peaks`), the sums of exp(logit - peak) [rows], and the entropies
// in nats [rows]. If a peak is not finite, the others are NaN.
UNSPOOL_API void unspool_measure(const float* logits, int64_t rows, int64_t width,
                                 int32_t has_peaks, double* peaks);

// Input: levels [rows]. Appends the number of logits of each row that are >= its level, as integers
// [rows].
UNSPOOL_API void unspool_counts(const float* logits, int64_t rows, int64_t width, double* levels);

// Input: one column per row, as integers [rows]. Replaces them by their logits, and appends the
// number of larger logits of the row, as integers [rows].
UNSPOOL_API void unspool_standing(const float* logits, int64_t rows, int64_t width,
                                  int64_t* columns);

// The `count` largest of each row (count <= width), largest first, ties by lower column: values
// [rows, count], then the columns as integers [rows, count].
UNSPOOL_API void unspool_leading(const float* logits, int64_t rows, int64_t width, int64_t count,
                                 double* values);

// Logits >= each row's level, in order of column, at most `room` per row: values [rows, room],
// padded with -inf, then the columns [rows, room], padded with 0.
UNSPOOL_API void unspool_above(const float* logits, int64_t rows, int64_t width,
                               const double* levels, int64_t room, double* values);

// Distinct tokens of the vocabulary among `count` tokens, in order of first occurrence, then at
// offset `count` how often each occurs; returns their number.
UNSPOOL_API int64_t unspool_tally(const int64_t* tokens, int64_t count, int64_t vocabulary,
                                  int64_t* unique);

// Samples one token per row as the chain of sampling stages does with these settings
// (`sampling/picker.py` names the columns), on `threads` threads. A row whose logits are not a
// distribution gets the token -1. With `targets` [rows] (a canvas; -1: none), `details` [rows, 3]
// gets each row's entropy, the difference between its two largest probabilities, and the
// log-probability of its target.
UNSPOOL_API void unspool_pick(const float* logits, int64_t rows, int64_t width,
                              const double* floats, const int64_t* ints, const int64_t* history,
                              int32_t threads, int64_t* tokens, double* logprobs,
                              const int64_t* targets, double* details);
