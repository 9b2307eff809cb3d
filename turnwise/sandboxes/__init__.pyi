"""The public names of the package, each with the module that it comes from."""

from turnwise.sandboxes.config import SandboxConfig as SandboxConfig
from turnwise.sandboxes.config import register_backend as register_backend
from turnwise.sandboxes.core import Capabilities as Capabilities
from turnwise.sandboxes.core import ExecResult as ExecResult
from turnwise.sandboxes.core import Mount as Mount
from turnwise.sandboxes.core import Sandbox as Sandbox
from turnwise.sandboxes.core import SandboxBackend as SandboxBackend
from turnwise.sandboxes.core import SandboxLimits as SandboxLimits
from turnwise.sandboxes.core import SandboxProcess as SandboxProcess
from turnwise.sandboxes.core import SandboxSpec as SandboxSpec
from turnwise.sandboxes.manager import SandboxManager as SandboxManager
