output "topic_arn" {
  description = "Topic of all alarms."
  value       = aws_sns_topic.this.arn
}
