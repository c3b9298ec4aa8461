// SPDX-License-Identifier: MIT
//
// exp, tanh, sigmoid, log and sin/cos: the one set of elementary functions that host and device
// share, so that a result computed by one predicts the other's bit for bit.
//
// Every function is a fixed sequence of IEEE operations: add, subtract, multiply, divide, and a fused
// multiply-add where `m_fma` is written.  No library function, no flush to zero, no contraction.  The
// templates take any V with those operations: `float`, or a vector of 16 lanes (host/simd.h).  The file
// is included inside the namespace of one instruction set, so that no two builds can share a symbol.
//
// V must offer: + - * / ; m_fma(a, b, c) ; m_less(a, b, x, y) = a < b ? x : y, which takes y for a NaN ;
// m_pow2(t) = 2^n for t = n + M_ROUND, -126 <= n <= 127 ; m_abs(x) ; m_sign(x, y) = |x| with the sign of y.

#ifndef K3_MATH_INLINE
#define K3_MATH_INLINE static inline
#endif

// 1.5 * 2^23: adding and subtracting it rounds to the nearest integer, and leaves that integer in the low bits.
#define K3_ROUND 12582912.0f

// e^x.  Relative error below 1e-7; 0 below -104, +inf above 88.73, NaN for NaN.
template <class V> K3_MATH_INLINE V k3_exp(V x) {
    const V magic = V(K3_ROUND);
    // Far outside the range the pieces below would overflow; a NaN passes both comparisons.
    V c = m_less(x, V(-104.0f), V(-104.0f), x);
    c = m_less(V(89.0f), c, V(89.0f), c);
    const V n = m_fma(c, V(1.44269504088896341f), magic) - magic;
    V r = m_fma(n, V(-0.693145751953125f), c);           // ln 2, upper bits: n times it is exact
    r = m_fma(n, V(-1.42860682030941723212e-6f), r);     // ln 2, the rest
    V q = V(0.0013814318226650357f);
    q = m_fma(q, r, V(0.008368851616978645f));
    q = m_fma(q, r, V(0.041668400168418884f));
    q = m_fma(q, r, V(0.1666651964187622f));
    q = m_fma(q, r, V(0.4999999403953552f));
    V e = m_fma(q, r * r, r) + V(1.0f);
    // 2^n in two factors, since 2^-150 and 2^128 are no floats of their own.
    const V half = m_fma(n, V(0.5f), magic) - magic;
    e = e * m_pow2(half + magic) * m_pow2((n - half) + magic);
    return m_less(x, V(-104.0f), V(0.0f), e);
}

// 1 / (1 + e^-x).
template <class V> K3_MATH_INLINE V k3_sigmoid(V x) { return V(1.0f) / (V(1.0f) + k3_exp(V(0.0f) - x)); }

// x * sigmoid(x); 0 far to the left.
template <class V> K3_MATH_INLINE V k3_silu(V x) { return x * k3_sigmoid(x); }

// tanh x.  A polynomial near zero keeps the relative error small there; elsewhere 1 - 2 / (e^2|x| + 1).
template <class V> K3_MATH_INLINE V k3_tanh(V x) {
    const V a = m_abs(x);
    const V z = x * x;
    V p = V(-0.00559100741520524f);
    p = m_fma(p, z, V(0.0205388106405735f));
    p = m_fma(p, z, V(-0.05370965600013733f));
    p = m_fma(p, z, V(0.133310928940773f));
    p = m_fma(p, z, V(-0.33333268761634827f));
    const V near = m_fma(p * z, x, x);
    const V far = m_sign(V(1.0f) - V(2.0f) / (k3_exp(a + a) + V(1.0f)), x);
    return m_less(a, V(0.625f), near, far);
}

// SiTU-GLU: [beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u / linear_beta)].  The sigmoid takes the
// gate as it is, not the capped one.
template <class V> K3_MATH_INLINE V k3_situ(V g, V u, V beta, V linear_beta) {
    const V gate = (beta * k3_tanh(g / beta)) * k3_sigmoid(g);
    return gate * (linear_beta * k3_tanh(u / linear_beta));
}

// log x for a positive, normal x: 2 atanh(s) with s = (m - 1) / (m + 1), m in [1/sqrt 2, sqrt 2).
K3_MATH_INLINE float k3_log(float x) {
    int e;
    float m = m_split(x, &e);
    if (m > 1.41421356f) {
        m = m * 0.5f;
        e += 1;
    }
    const float f = m - 1.0f;
    const float s = f / (f + 2.0f);
    const float z = s * s;
    float p = m_fma(z, 2.0f / 11.0f, 2.0f / 9.0f);
    p = m_fma(p, z, 2.0f / 7.0f);
    p = m_fma(p, z, 2.0f / 5.0f);
    p = m_fma(p, z, 2.0f / 3.0f);
    const float y = m_fma(p * z, s, s + s);
    const float n = (float)e;
    return m_fma(n, 0.693145751953125f, m_fma(n, 1.42860682030941723212e-6f, y));
}

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|).
K3_MATH_INLINE float k3_softplus(float x) {
    const float u = k3_exp(0.0f - m_abs(x));
    const float w = 1.0f + u;
    const float tail = k3_log(w) + (u - (w - 1.0f)) / w;     // what the addition 1 + u rounded away
    return x < 0.0f ? tail : x + tail;                       // a NaN takes the second branch and stays one
}

// cos and sin of position * frequency, in double: at a million positions a float angle would have lost
// a tenth of a radian.  The reduction is exact enough below 2^31.
K3_MATH_INLINE void k3_cos_sin(double position, double frequency, float* c, float* s) {
    const double angle = position * frequency;
    const double magic = 6755399441055744.0;                 // 1.5 * 2^52
    const double t = angle * 0.63661977236758134308 + magic;
    const double n = t - magic;
    double r = m_fma64(n, -1.57079632679489655800, angle);
    r = m_fma64(n, -6.12323399573676603587e-17, r);
    const double z = r * r;
    double sp = -1.0 / 1307674368000.0, cp = -1.0 / 87178291200.0;
    sp = sp * z + 1.0 / 6227020800.0;
    sp = sp * z - 1.0 / 39916800.0;
    sp = sp * z + 1.0 / 362880.0;
    sp = sp * z - 1.0 / 5040.0;
    sp = sp * z + 1.0 / 120.0;
    sp = sp * z - 1.0 / 6.0;
    const double sine = r + r * z * sp;
    cp = cp * z + 1.0 / 479001600.0;
    cp = cp * z - 1.0 / 3628800.0;
    cp = cp * z + 1.0 / 40320.0;
    cp = cp * z - 1.0 / 720.0;
    cp = cp * z + 1.0 / 24.0;
    cp = cp * z - 0.5;
    const double cosine = 1.0 + z * cp;
    const long long quadrant = (long long)n & 3;
    const double cs = (quadrant & 1) ? sine : cosine;
    const double sn = (quadrant & 1) ? cosine : sine;
    *c = (float)((quadrant == 1 || quadrant == 2) ? -cs : cs);
    *s = (float)((quadrant >= 2) ? -sn : sn);
}
