"""The messages, one class each. A class's `code` is its number on the wire and never changes meaning.

Client to broker below 64, broker to client from 64. `request` numbers are the client's own and come back in the answer;
`number` counts what changes state (see the directory's events): a retry is applied once. Pong answers Ping and Notices.
"""

from __future__ import annotations

from connector.core.directory.effects import Descriptor as Descriptor
from connector.core.directory.effects import Notice as Notice
from connector.core.directory.effects import Way as Way
from connector.core.directory.events import Hold as Hold
from connector.core.directory.events import Member as Member
from connector.core.directory.events import Span as Span
from connector.core.directory.events import Told as Told
from connector.wire.from_broker import Answer as Answer
from connector.wire.from_broker import Deliver as Deliver
from connector.wire.from_broker import Direct as Direct
from connector.wire.from_broker import Drop as Drop
from connector.wire.from_broker import Ended as Ended
from connector.wire.from_broker import Failure as Failure
from connector.wire.from_broker import Grant as Grant
from connector.wire.from_broker import Next as Next
from connector.wire.from_broker import Notices as Notices
from connector.wire.from_broker import Peer as Peer
from connector.wire.from_broker import Ping as Ping
from connector.wire.from_broker import PutFailed as PutFailed
from connector.wire.from_broker import PutNoted as PutNoted
from connector.wire.from_broker import Recall as Recall
from connector.wire.from_broker import Resend as Resend
from connector.wire.from_broker import Rows as Rows
from connector.wire.from_broker import Shown as Shown
from connector.wire.from_broker import Stopping as Stopping
from connector.wire.from_broker import StreamFailed as StreamFailed
from connector.wire.from_broker import Welcome as Welcome
from connector.wire.from_client import Abort as Abort
from connector.wire.from_client import Await as Await
from connector.wire.from_client import Begin as Begin
from connector.wire.from_client import Bye as Bye
from connector.wire.from_client import Cancel as Cancel
from connector.wire.from_client import Claim as Claim
from connector.wire.from_client import Enter as Enter
from connector.wire.from_client import FellBack as FellBack
from connector.wire.from_client import Finish as Finish
from connector.wire.from_client import Hello as Hello
from connector.wire.from_client import Inspect as Inspect
from connector.wire.from_client import ListPage as ListPage
from connector.wire.from_client import Pong as Pong
from connector.wire.from_client import Release as Release
from connector.wire.from_client import Remove as Remove
from connector.wire.from_client import Reserve as Reserve
from connector.wire.from_client import Return as Return
from connector.wire.from_client import Seal as Seal
from connector.wire.from_client import Seals as Seals
from connector.wire.from_client import Status as Status
from connector.wire.from_client import Story as Story
from connector.wire.from_client import Subscribe as Subscribe
from connector.wire.from_client import Took as Took
from connector.wire.message import TOKEN_BYTES as TOKEN_BYTES
from connector.wire.message import VERSION as VERSION
from connector.wire.message import Message as Message


def _all() -> list[type[Message]]:
    """By name, not by `__subclasses__`: a slotted dataclass leaves its first draft there until it is collected."""
    return [c for c in list(globals().values()) if isinstance(c, type) and issubclass(c, Message) and c is not Message]


MESSAGES = tuple(_all())
BY_CODE: dict[int, type[Message]] = {cls.code: cls for cls in MESSAGES}
#: Codes below are sent by clients, from here on by the broker.
FIRST_BROKER_CODE = 64
