# SPDX-License-Identifier: Apache-2.0
"""One call: what its tensors must be, its routing, its operators and its gradients.

Must not depend on parameters or modules.
"""
