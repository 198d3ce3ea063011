# SPDX-License-Identifier: Apache-2.0
"""What a layer is: sizes, formats, activations, and the reference that says what it computes.

Must not depend on ranks, engines or any room but `system`.
"""
