// Floats of 16 bits, rounded to nearest, ties to even. Each file has functions of its own, compiled for its instruction set.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace chunkattn {
namespace {

inline uint16_t rounded_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return x == x ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : 0x7fc0u;
}
inline uint16_t rounded_f16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65,520 and more
  if (magnitude < 0x38800000u) return sign | uint32_t(std::nearbyint(std::fabs(x) * 16777216.f));
  return sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
}

}  // namespace
}  // namespace chunkattn
