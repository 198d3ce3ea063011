# SPDX-License-Identifier: Apache-2.0
"""What runs a call: a folder for each machine of the device OS, and what both share.

Each folder makes an `Engine`. Must not depend on modules, their parameters or checkpoints.
"""
