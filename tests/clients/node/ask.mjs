// Asks a server through clients of Node.js: `node ask.mjs URL`. Prints one JSON object, an answer for each client.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { CohereRerank } from "@langchain/cohere";
import { ChatOpenAI, OpenAI as LangChainOpenAI } from "@langchain/openai";
import { generateText, streamText } from "ai";
import { CohereClient, CohereClientV2 } from "cohere-ai";
import OpenAI from "openai";

const { url, model, messages, prompt, query, documents } = JSON.parse(process.argv[2]);
const [apiKey, baseURL, maxTokens] = ["none", `${url}/v1`, 12];

async function openai() {
  const client = new OpenAI({ apiKey, baseURL, maxRetries: 0 });
  const chat = await client.chat.completions.create({ model, messages, temperature: 0, max_completion_tokens: maxTokens });
  const stream = await client.completions.create({ model, prompt, temperature: 0, max_tokens: maxTokens, stream: true });
  let completion = "";
  for await (const event of stream) completion += event.choices[0]?.text ?? "";
  let fault;
  try {
    await client.chat.completions.create({ model, messages, top_p: 9 });
  } catch (error) {
    fault = { status: error.status, param: error.param, type: error.type };
  }
  return { chat: chat.choices[0].message.content, completion, fault, models: (await client.models.list()).data.length };
}

async function aiSdk() {
  const provider = createOpenAICompatible({ name: "chunkattn", apiKey, baseURL });
  const asked = { model: provider(model), messages, temperature: 0, maxOutputTokens: maxTokens, maxRetries: 0 };
  const chat = await generateText(asked);
  let streamed = "";
  for await (const part of streamText(asked).textStream) streamed += part;
  return { chat: chat.text, streamed, tokens: chat.usage.outputTokens };
}

async function langchain() {
  const options = { apiKey, configuration: { baseURL }, model, temperature: 0, maxTokens, maxRetries: 0 };
  const chat = new ChatOpenAI(options);
  const asked = messages.map(({ role, content }) => [role === "user" ? "human" : role, content]);
  let streamed = "";
  for await (const part of await chat.stream(asked)) streamed += part.content;
  return { chat: (await chat.invoke(asked)).content, streamed, completion: await new LangChainOpenAI(options).invoke(prompt) };
}

async function cohere() {
  const options = { token: apiKey, environment: url };
  const one = await new CohereClient(options).rerank({ model, query, documents, topN: 2 });
  const two = await new CohereClientV2(options).rerank({ model, query, documents });
  const ranked = new CohereRerank({ client: new CohereClient(options), model, topN: 2 });
  return {
    v1: one.results.map((result) => [result.index, result.relevanceScore]),
    v2: two.results.map((result) => [result.index, result.relevanceScore]),
    langchain: (await ranked.rerank(documents, query)).map((result) => [result.index, result.relevanceScore]),
  };
}

console.log(JSON.stringify({ openai: await openai(), aiSdk: await aiSdk(), langchain: await langchain(), cohere: await cohere() }));
