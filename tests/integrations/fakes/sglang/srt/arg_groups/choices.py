# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: what command lines may say."""

MOE_RUNNER_BACKEND_CHOICES = ["auto", "triton", "deep_gemm"]

add_moe_runner_backend_choices = MOE_RUNNER_BACKEND_CHOICES.extend
