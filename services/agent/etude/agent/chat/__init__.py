"""Chat formats: any model's own tokenizer and chat template, token by token."""

from etude.agent.chat.conversation import Conversation, DeltaError
from etude.agent.chat.data_format import DataFormat
from etude.agent.chat.format import ChatFormat
from etude.agent.chat.messages import Message
from etude.agent.chat.plain import CHAT_TEMPLATE, LAYOUT_TOKENS
from etude.agent.chat.supervised import SupervisedTokens
from etude.agent.chat.template import TemplateError
from etude.agent.chat.vocabulary import Vocabulary

__all__ = [
    "CHAT_TEMPLATE",
    "LAYOUT_TOKENS",
    "ChatFormat",
    "Conversation",
    "DataFormat",
    "DeltaError",
    "Message",
    "SupervisedTokens",
    "TemplateError",
    "Vocabulary",
]
