# SPDX-License-Identifier: Apache-2.0
"""One file for each machine that the device OS runs on; each makes an `Engine`."""
