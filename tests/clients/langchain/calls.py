"""A tool that the adapter `calculator` calls, in a stream."""

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def calculator(expression: str) -> int:
    """The sum of two numbers."""
    left, _, right = expression.split()
    return int(left) + int(right)


asked = {"model": "calculator", "base_url": "http://127.0.0.1:8000/v1", "api_key": "none", "temperature": 0}
model = ChatOpenAI(**asked).bind_tools([calculator])
chat = [HumanMessage("What is 27 + 15?")]
first, *rest = model.stream(chat)
answer = sum(rest, start=first)
for call in answer.tool_calls:
    print(call["name"], call["args"]["expression"])
    chat += [answer, calculator.invoke(call)]
print(model.invoke(chat).text)
